"""The publisher's sources match the content of real cache tiers: a Mooncake store, and an LMCache server under a real
vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from loadtest.commands.child_processes import free_port
from router.config.schema import Limits
from router.frontends.http.upstream import UpstreamPools
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.holder_blocks import HolderBlocks
from router.publisher.lmcache import Coordinator, lmcache_routes
from router.publisher.mooncake_source import Listing, MooncakeSource
from router.types import BlocksStored, Generation, Tier
from tests.kit.sinks import IndexSink
from tests.live.engines import HOME
from tests.live.tiers import CHUNK_TOKENS, lmcache_server, mooncake_client, mooncake_master, reporting, vllm_on_lmcache

pytestmark = [pytest.mark.live, pytest.mark.net]

MODEL = HOME / "model" / "tiny-llama"
GENERATION = Generation(model="tiny", block_size_tokens=16)
SOON_S = 20.0


def soon(condition: Callable[[], bool]) -> None:
    """Poll: tiers publish with a delay."""
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


# --- Mooncake ---


@pytest.mark.anyio
async def test_a_mooncake_store_is_tracked_through_puts_removals_and_failures() -> None:
    """Objects named as by vLLM's connector, for two ranks. Pods have published the blocks."""
    pod = HolderBlocks(GENERATION)
    digests = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(3)]
    for number, digest in enumerate(digests):
        named = (int(digest[-16:], 16),)
        pod.apply(BlocksStored(block_hashes=named, parent_hash=None, tokens=(number,) * 16, block_size_tokens=16))
    block = [set(pod.blocks_of(int(digest[-16:], 16)) or ()) for digest in digests]
    names = [[f"org/m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{digest}" for rank in (0, 1)] for digest in digests]
    index = IndexSink(GENERATION, pod.blocks_of)
    index.restarted("store")
    ports = free_port(), free_port(), free_port()

    def held() -> set[int]:
        return index.held("store", Tier.REMOTE)

    get_url = UpstreamPools(
        Limits(connect_timeout_s=SOON_S, first_byte_timeout_s=SOON_S, idle_timeout_s=SOON_S)
    ).get_url
    with mooncake_master(*ports) as url:
        source = MooncakeSource("store", url, Listing("org/m"), index, get_url, 2.0)
        with mooncake_client(*ports[:2], free_port()) as client:
            client.put(*names[0], *names[1], names[2][0], "somebody's/other-object")
            await source.poll()
            assert held() == block[0] | block[1]
            client.put(names[2][1])
            client.remove(names[0][1])
            await source.poll()
            assert held() == block[1] | block[2]
        await _polled_until(source, lambda: not held())  # its memory is dropped after client_ttl
        with mooncake_client(*ports[:2], free_port()) as client:
            client.put(*names[0])
            await source.poll()
            assert held() == block[0]
    await source.poll()
    assert (held(), index.complete) == (block[0], {"store": False})
    with mooncake_master(*ports):
        await source.poll()
        assert (held(), index.complete) == (set(), {"store": True})


async def _polled_until(source: MooncakeSource, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await source.poll()
            await asyncio.sleep(0.1)


# --- LMCache ---


@contextmanager
def serving(coordinator: Coordinator, port: int) -> Iterator[None]:
    """The coordinator's endpoints on a port."""
    app = FastAPI()
    app.include_router(lmcache_routes(coordinator))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        soon(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join()


def blocks_of(*prompts: list[int]) -> set[int]:
    """Whole chunks of these prompts, as a tier holds them."""
    root = generation_seed(GENERATION)
    whole = [prompt[: len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS] for prompt in prompts]
    return {block for prompt in whole for block in hash_blocks(token_array(prompt), 16, root)}


def test_an_lmcache_server_reports_the_blocks_of_a_real_vllm(tmp_path: Path) -> None:
    """Block for block, in its memory and its files; it is cleared, survives our restart, and leaves."""
    first = [(k * 31 + 7) % 120000 for k in range(300)]
    second = first[:130] + [(k * 37 + 9) % 120000 for k in range(300)]
    port, lmcache_port = free_port(), free_port()
    index, later = IndexSink(GENERATION), IndexSink(GENERATION)
    plays, again = Coordinator(str(MODEL), index), Coordinator(str(MODEL), later)
    with ExitStack() as ours:
        ours.enter_context(serving(plays, port))
        with (
            lmcache_server(lmcache_port, free_port(), reporting(f"http://127.0.0.1:{port}", tmp_path / "l2")) as tier,
            vllm_on_lmcache(free_port(), MODEL, lmcache_port) as vllm,
        ):
            soon(lambda: plays.host_of("live-cache") == "127.0.0.1")
            _complete(vllm, first)
            _complete(vllm, second)
            soon(lambda: index.held("live-cache", Tier.CPU) == blocks_of(first, second))
            soon(lambda: index.held("live-cache/fs", Tier.DISK) == blocks_of(first, second))
            assert index.complete == {"live-cache": True, "live-cache/fs": True}
            httpx.post(f"{tier}/cache/clear", json={"tier": "l1", "force": True}).raise_for_status()
            soon(lambda: not index.held("live-cache", Tier.CPU))
            assert index.held("live-cache/fs", Tier.DISK) == blocks_of(first, second)
            ours.close()
            ours.enter_context(serving(again, port))
            soon(lambda: again.host_of("live-cache") == "127.0.0.1")
            _complete(vllm, first[::-1])
            soon(lambda: later.held("live-cache", Tier.CPU) == blocks_of(first[::-1]))
            soon(lambda: later.held("live-cache/fs", Tier.DISK) == blocks_of(first[::-1]))
            assert later.complete["live-cache"] is False
        assert later.holders == {}


def _complete(url: str, prompt: list[int]) -> None:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status()
