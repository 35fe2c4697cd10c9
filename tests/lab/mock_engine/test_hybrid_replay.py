"""A router that joins late reads what a pod with windows or states has published, and expects the same hits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from loadtest.mock_engine.mock_engine import MockEngine
from router.engines.adapter import KvEventSource
from router.feeds.kv_zmq import KvFeed
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.hit_probe import CacheHabits
from router.stores.prefix_store import LocalStore
from router.types import AttentionKind, Generation, KvEvent, LayerType, PodId, PromptPrefix
from tests.kit.layered_pool import layered
from tests.kit.scenes import make_pod
from tests.lab.conftest import MakeConfig

pytestmark = [pytest.mark.net, pytest.mark.anyio]
POD, BLOCK = "a", 16
GENERATION = Generation(model="m", block_size_tokens=BLOCK)
FULL, STATE = LayerType(AttentionKind.FULL, BLOCK), LayerType(AttentionKind.STATE, BLOCK)
WINDOW = LayerType(AttentionKind.WINDOW, BLOCK, 64)


class Router:
    """The index of a router that follows the engine, and nothing else of it."""

    def __init__(self, habits: CacheHabits) -> None:
        self.store, self._habits = LocalStore(), habits
        self.restarted(POD)
        self._messages, self._news = 0, asyncio.Event()

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        self.store.apply(pod, events)

    def applied(self, pod: PodId, events: int) -> None:
        self._messages += 1
        self._news.set()

    def restarted(self, pod: PodId) -> None:
        self.store.add_holder(make_pod(pod), GENERATION)
        self.store.learn(pod, self._habits)

    def stream_state(self, pod: PodId, *, complete: bool) -> None:
        """Ignored."""

    async def until_current(self, engine: MockEngine) -> None:
        assert engine._publisher is not None
        async with asyncio.timeout(30):
            while self._messages < engine._publisher._sequence:
                self._news.clear()
                await self._news.wait()

    def expected(self, prompt: Sequence[int]) -> int:
        tokens = token_array(prompt)
        prefix = PromptPrefix(GENERATION, tokens, hash_blocks(tokens, BLOCK, generation_seed(GENERATION)))
        hit = BLOCK * self.store.match(prefix, 0.0).held_blocks(POD)
        return min(hit, (len(prompt) - 1) // BLOCK * BLOCK)


@asynccontextmanager
async def following(engine: MockEngine, habits: CacheHabits) -> AsyncIterator[Router]:
    router = Router(habits)
    source = KvEventSource(engine.kv_endpoint, engine.kv_replay_endpoint)
    running = asyncio.create_task(KvFeed(POD, source, router, replay_idle_ms=30_000).run())
    try:
        await router.until_current(engine)
        yield router
    finally:
        running.cancel()
        await asyncio.wait([running])


def prompts(seed: int) -> Iterator[list[int]]:
    """They share starts, are continued, cut and sent again."""
    rng = random.Random(seed)
    start = [rng.randrange(1000) for _ in range(200)]
    known = [start]
    while True:
        prompt = rng.choice([*known, start])
        if rng.random() < 0.3:
            prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        prompt = prompt + [rng.randrange(1000) for _ in range(rng.choice([0, 16, 90]))]
        known.append(prompt)
        yield prompt


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("groups", [(WINDOW, FULL), (*[WINDOW] * 5, FULL), (STATE, STATE, STATE, FULL)])
async def test_a_router_that_joins_late_expects_the_hits_that_the_pod_reports(
    groups: tuple[LayerType, ...], drops: bool, make_config: MakeConfig
) -> None:
    habits, asked = CacheHabits(drops_block=drops), prompts(len(groups))
    config = make_config(block_size_tokens=BLOCK, num_blocks=4096, new_pool=layered(groups, habits))
    async with MockEngine(config) as engine, httpx.AsyncClient(base_url=engine.url) as client:

        async def reported(prompt: list[int]) -> int:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 20}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            return found

        async with following(engine, habits) as early:
            for _ in range(20):
                await reported(next(asked))
            await early.until_current(engine)
            async with following(engine, habits) as late:
                hits = []
                for _ in range(20):
                    prompt = next(asked)
                    await late.until_current(engine)
                    await early.until_current(engine)
                    expected = late.expected(prompt), early.expected(prompt)
                    hits.append((*expected, await reported(prompt)))
    assert [hit for hit in hits if len(set(hit)) > 1] == []
    assert sum(hit for *_, hit in hits) > 1000
