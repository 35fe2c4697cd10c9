"""A whole router in this process, in front of a good mock engine, for targets that need an event loop.

It is started once, and each input meets the router as the inputs before left it. `Town.play` runs an input alongside
good requests, then checks that nothing of it is left: no request in flight, no memory, and no callback of the router
that held the loop for longer than `MOST_CALLBACK_S` of CPU time. A good request has its share: until it is answered,
the router computes for at most `MOST_WAIT_S`. That is its latency without what other processes take. Both are times of
the reference machine (`tests/bench/pace.py`).
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from loadtest.faults.soak import left_behind
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine, running_engines
from router.config.load import shipped
from router.config.models import load_priors
from router.config.pod_schema import PodConfig
from router.config.schema import Limits, Log, ModelConfig, RouterConfig
from router.fleet.breaker import Probes
from router.observe.fast_metrics import pieces
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import PodState, PrefixTrust
from router.wiring.router import Router, build_router
from tests.bench.pace import slowness
from tests.kit.scenes import LLAMA_8B
from tests.loaded_tokenizers import loaded_tokenizer
from tests.stories.conftest import SOURCE, TEMPLATE, listening

MOST_CALLBACK_S = 0.02 if "atheris" in sys.modules else math.inf
"""Instrumented code takes several times as long."""
MOST_WAIT_S = 10 * MOST_CALLBACK_S
MOST_GROWTH_BYTES = 192 * 1024 * 1024
"""Over all inputs: the router's caches fill up."""
DEADLINE_S = 30.0
"""Within which a good request is answered, and what an input left is gone."""
REPEATED, REPEATS, MAX_BYTES = b"\xff\xfe", 256, 1 << 20
"""What is between two of these marks is sent as often: inputs are short."""
TRIES = 5
"""What is slow must be slow each time: the first time includes what is computed once."""
GOOD, EVIL = "key-good", "key-evil"
_FOLDER = str(Path(__file__).parents[2] / "router") + "/"


class Watch:
    """The CPU time of the router's callbacks: not of those of clients and engines in the same loop."""

    def __init__(self) -> None:
        self.slowest_s, self.slowest = 0.0, ""
        self.spent_s = self.longest_wait_s = 0.0
        """What all callbacks took, and those during one good request."""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        run, watch = asyncio.Handle._run, self

        def watched(handle: asyncio.Handle) -> None:
            name = _owner(handle)
            began_s = time.thread_time()
            run(handle)
            spent_s = time.thread_time() - began_s
            self.spent_s += spent_s * bool(name)
            if name and spent_s > MOST_CALLBACK_S:
                spent_s /= slowness()
            if spent_s > watch.slowest_s and name:
                watch.slowest_s, watch.slowest = spent_s, name

        self.slowest_s, self.slowest, self.longest_wait_s = 0.0, "", 0.0
        asyncio.Handle._run = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]

    def excess(self) -> str:
        """What took too long; "" if nothing did."""
        if self.slowest_s > MOST_CALLBACK_S:
            return f"{self.slowest} held the loop for {self.slowest_s * 1000:.1f} ms"
        if self.longest_wait_s > MOST_WAIT_S * slowness():
            return f"the router computed {self.longest_wait_s * 1000:.1f} ms before a good request was answered"
        return ""


def _owner(handle: Any) -> str:
    """What runs in a callback of the router: the task or protocol; "" for others."""
    callback = handle._callback
    while isinstance(callback, partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        code = getattr(owner.get_coro(), "cr_code", None)
        _, inside, module = (code.co_filename if code is not None else "").partition(_FOLDER)
        name = f"router.{module.replace('/', '.')}: {owner.get_name()}" if inside else ""
    else:
        found = getattr(owner, "_protocol", owner if owner is not None else callback)
        kind = found if hasattr(found, "__qualname__") else type(found)
        name = f"{kind.__module__}:{kind.__qualname__}"
    return name if name.startswith("router.") else ""


@dataclass(slots=True)
class Town:
    """The router's address and parts."""

    program: Router
    engine: MockEngine
    port: int
    watch: Watch = field(default_factory=Watch)
    rss_bytes: int = 0

    async def good(self, words: str = "Hello") -> tuple[int, str]:
        """Send a good tenant's chat; its status, and the pod that answered."""
        body = msgspec.json.encode({"model": "demo", "messages": [{"role": "user", "content": words}], "max_tokens": 2})
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\nauthorization: Bearer %b\r\n"
        sent = head % GOOD.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        before_s = self.watch.spent_s
        async with asyncio.timeout(DEADLINE_S):
            answer = await self.exchange(sent + body)
        self.watch.longest_wait_s = max(self.watch.longest_wait_s, self.watch.spent_s - before_s)
        headers = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
        named = dict(line.split(b": ", 1) for line in headers[1:])
        return int(headers[0][9:12]), named.get(b"x-warmroute-pod", b"").decode()

    async def exchange(self, sent: bytes) -> bytes:
        """All that the router answers on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            return await reader.read()
        finally:
            writer.transport.abort()

    async def play(self, attack: Callable[[Town], Awaitable[None]]) -> None:
        for attempt in range(TRIES):
            gc.collect()
            gc.disable()  # what is collected is seldom what the callback made
            try:
                async with self.watch.watching():
                    await attack(self)
                    await self.until(lambda: not any(self.left_behind().values()))
            finally:
                gc.enable()
            found = self.watch.excess()
            if not found:
                break
            assert attempt < TRIES - 1, found
        grown = rss_bytes() - self.rss_bytes
        assert grown <= MOST_GROWTH_BYTES, f"memory grew by {grown / 2**20:.0f} MiB"

    def left_behind(self) -> dict[str, float]:
        """Gauges that must be 0, and bodies in memory."""
        text = b"".join(pieces(self.program.metrics.registry)).decode()
        return {**left_behind(text), "body bytes": float(self.program.edge.body_memory.bytes)}

    async def until(self, holds: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < ends_s, f"left behind: {self.left_behind()}"
            await asyncio.sleep(0.005)


def expanded(data: bytes) -> bytes:
    """The data with what it repeats. `content-length: ?` becomes the length of what follows the head."""
    pieces = data.split(REPEATED)
    times = max(1, min(REPEATS, MAX_BYTES // (1 + sum(map(len, pieces[1::2])))))
    sent = b"".join([piece * (times if number % 2 else 1) for number, piece in enumerate(pieces)])
    head, _, body = sent.partition(b"\r\n\r\n")
    return sent.replace(b"content-length: ?", b"content-length: %d" % len(body), 1) if head else sent


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


TENANTS = f"""
tenants:
- {{name: good, keys: [{digest(GOOD)}]}}
- {{name: evil, keys: [{digest(EVIL)}]}}
"""


def _tokenizer() -> Tokenizer:
    """With a template that prints tools with an indent, as those of Llama 3.1 to 3.3."""
    tokenizer = copy(loaded_tokenizer(SOURCE))
    tokenizer.chat_template = Path(TEMPLATE).read_text("utf-8").replace("tojson", "tojson(indent=4)")
    return tokenizer


async def _stay(started: asyncio.Future[Town]) -> None:
    """Run the router for the rest of the process."""
    tokenizer = _tokenizer()
    template = ChatTemplate(tokenizer)
    engine = MockEngineConfig(
        models=("demo",), tokenizer=tokenizer, render=template.render, template=template, speed=LLAMA_8B, time_scale=0.0
    )
    with TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.yaml"
        tenants.write_text(TENANTS)
        async with running_engines([engine]) as engines:
            config = RouterConfig(
                models=(ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),),
                pods=(PodConfig(url=engines[0].url, speed=LLAMA_8B),),
                tenants=str(tenants),
                log=Log(requests=False),
                limits=Limits(max_body_bytes=1 << 20, request_timeout_s=1, first_byte_timeout_s=10, idle_timeout_s=10),
                probes=Probes(health_interval_s=0.05, load_interval_s=0.02, self_test_interval_s=0.2),
            )
            priors = load_priors(shipped("config") / "models")
            program = build_router(config, shipped("policies"), priors, load=lambda source, *, fast: tokenizer)
            await _serve(program, engines[0], started)


async def _serve(program: Router, engine: MockEngine, started: asyncio.Future[Town]) -> None:
    async with listening(program) as (_, url):
        started.set_result(await _warm(Town(program, engine, int(url.rpartition(":")[2]))))
        await asyncio.Event().wait()


async def _warm(town: Town) -> Town:
    pods = town.program.fleet
    await town.until(lambda: bool(pods.snapshot.pods) and all(map(_is_trusted, pods.snapshot.pods)))
    for number in range(20):
        assert await town.good(f"warm up {number}")
    gc.collect()
    gc.freeze()
    town.rss_bytes = rss_bytes()
    return town


def _is_trusted(status: Any) -> bool:
    return status.state is PodState.READY and status.pod.trust is PrefixTrust.TRUSTED


@cache
def _started() -> tuple[asyncio.AbstractEventLoop, Town]:
    loop = asyncio.new_event_loop()  # asyncio's own: callbacks of uvloop cannot be watched
    started: asyncio.Future[Town] = loop.create_future()
    staying: asyncio.Future[Any] = loop.create_task(_stay(started))
    loop.run_until_complete(asyncio.wait({started, staying}, return_when=asyncio.FIRST_COMPLETED))
    if staying.done():
        staying.result()
    return loop, started.result()


def play(attack: Callable[[Town], Awaitable[None]]) -> None:
    """Run an input in the only town of this process."""
    loop, town = _started()
    loop.run_until_complete(town.play(attack))
