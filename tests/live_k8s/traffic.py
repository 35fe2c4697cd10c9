"""Clients of a release, each of whose answers is complete or a failure."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.live_k8s.api_server import ClusterFailed
from tests.live_k8s.release import POLL_S, Release

SHORT_TOKENS, LONG_TOKENS = 4, 400
"""160 tokens take a second."""
LONG_EVERY = 50
PAUSE_S = 0.1
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class FailedAnswer:
    """`pod`: empty where no response began."""

    pod: str
    began_s: float
    error: str


@dataclass
class Traffic:
    """Streams of clients through a URL that is chosen for each."""

    release: Release
    choose_url: Callable[[], Awaitable[str]]
    answers: int = 0
    failures: list[FailedAnswer] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    """Answers that began and have not ended, by pod."""
    pods: Counter[str] = field(default_factory=Counter)
    """Answers that began, by pod."""

    async def more(self, answers: int) -> None:
        """Wait for this many further answers."""
        until = self.answers + answers
        await self.release.eventually(lambda: self.answers + len(self.failures) >= until)

    async def chat_for_ever(self, name: str, answer_tokens: int) -> None:
        """One client, which sends its next turn after each answer."""
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            for turn in itertools.count():
                await self._chat(client, f"Client {name}, turn {turn}.", answer_tokens)
                await asyncio.sleep(PAUSE_S)

    async def arrive_for_ever(self, rate_per_s: float) -> None:
        """Independent clients, which share connections; one answer in `LONG_EVERY` is long."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in itertools.count():
                await asyncio.sleep(max(0.0, began_s + number / rate_per_s - now_s()))
                tokens = SHORT_TOKENS if number % LONG_EVERY else LONG_TOKENS
                tasks.create_task(self._chat(client, f"Client {number % 50}.", tokens))

    async def _chat(self, client: httpx.AsyncClient, start: str, answer_tokens: int) -> None:
        began_s, pod = asyncio.get_running_loop().time(), ""
        body = {
            "model": "demo",
            "stream": True,
            "max_tokens": answer_tokens,
            "messages": [{"role": "user", "content": start + " The quick brown fox jumps over the lazy dog." * 8}],
        }
        try:
            url = f"{await self.choose_url()}/v1/chat/completions"
            async with client.stream("POST", url, json=body) as response:
                pod = response.headers.get("x-warmroute-pod", "")
                self.pods[pod] += 1
                self.running[pod] += 1
                try:
                    received = await response.aread()
                finally:
                    self.running[pod] -= 1
                if response.status_code != 200 or not received.rstrip().endswith(b"[DONE]"):
                    raise ClusterFailed(f"{response.status_code} {received[-300:]!r}")
            self.answers += 1
        except (httpx.HTTPError, ClusterFailed) as error:
            self.failures.append(FailedAnswer(pod, began_s, str(error) or repr(error)))


async def any_router(release: Release) -> str:
    """The URL of one that is ready, as a Service chooses it for each connection."""
    while not (routers := release.routers):
        await asyncio.sleep(POLL_S)
    return f"http://{random.choice(routers).container.address}:8080"


@asynccontextmanager
async def traffic(release: Release, clients: int = 4, answer_tokens: int = 160) -> AsyncIterator[Traffic]:
    """Clients that chat until the end of the block."""
    found = Traffic(release, lambda: any_router(release))
    async with _until_exit(*(found.chat_for_ever(str(number), answer_tokens) for number in range(clients))):
        yield found


@asynccontextmanager
async def arrivals(release: Release, rate_per_s: float, url: str) -> AsyncIterator[Traffic]:
    """Clients that arrive at this rate until the end of the block."""

    async def same_url() -> str:
        return url

    found = Traffic(release, same_url)
    async with _until_exit(found.arrive_for_ever(rate_per_s)):
        yield found


@asynccontextmanager
async def _until_exit(*loops: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
