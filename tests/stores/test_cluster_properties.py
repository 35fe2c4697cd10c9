"""The index equals a naive model over a real server, for any failures of publishers, Redis and the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain, count, takewhile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.config.index_schema import Publish
from router.feeds.kv_redis import IndexFeed
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.cluster import ClusterIndex
from router.index.holders import HolderFacts, hashes_by_generation
from router.publisher.published_holder import PublishedHolder
from router.stores.holder_writer import HolderWriter
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import ReplicaStore
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys, scope_of
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, Generation, KvEvent, PromptPrefix
from tests.kit.scenes import make_pod
from tests.redis_process import RedisProcess, address_of, redis_process

pytestmark = [pytest.mark.anyio, pytest.mark.net]

BLOCK = 2
PODS = ("a", "b")
PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9, 9), (5, 5, 5, 5))
GENERATIONS = tuple(Generation(model="m", revision=name, block_size_tokens=BLOCK) for name in ("r1", "r2"))
SETTINGS = Publish(heartbeat_s=0.03, flush_interval_ms=0.001, reload_jitter_s=0.0)
NAMESPACES = count()

Chain = tuple[int, ...]
"""The tokens of a block and of all before it: what a block is, without any hashing."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    """One server for all examples; each has its own namespace."""
    with redis_process() as process:
        yield process


class World:
    """Publishers and a replica; and a naive model of which pod holds which chains."""

    def __init__(self, server: RedisProcess) -> None:
        self.keys = Keys(f"test{next(NAMESPACES)}")
        self.connection = RedisConnection(address_of(server.url, timeout_s=20))
        self.reader = IndexReader(self.connection, self.keys)
        self.replica = ReplicaStore(ClusterIndex(holder_ttl_s=60), max_age_s=60)
        self.feed = IndexFeed(self.reader, self.replica, lambda generation: generation.model == "m", refresh_s=0.01)
        self.generation = dict.fromkeys(PODS, GENERATIONS[0])
        self.held: dict[str, set[Chain]] = {pod: set() for pod in PODS}
        self.events: dict[str, list[KvEvent]] = {pod: [] for pod in PODS}
        """Events of each pod's present cache. An event names its parent, which may have been removed since."""
        self.publishers: dict[str, list[PublishedHolder]] = {pod: [] for pod in PODS}
        self.tasks: list[asyncio.Task[None]] = [asyncio.create_task(self.feed.run())]
        for name in PODS:
            self.replica.add_holder(make_pod(name), GENERATIONS[0])
            self.publish(name)

    def publish(self, pod: str) -> None:
        """Start a publisher that has all events; previous ones still run and receive events too."""
        generation = self.generation[pod]
        writer = HolderWriter(self.connection, self.keys, generation, pod, 30.0)
        holder = PublishedHolder(writer, HolderFacts(url=f"http://{pod}"), SETTINGS, start_s=5.0)
        holder.apply(self.events[pod])
        holder.caught_up(complete=True)
        self.publishers[pod].append(holder)
        self.tasks.append(asyncio.create_task(holder.run()))

    def store(self, pod: str, prompt: int, blocks: int) -> None:
        """The pod computes the first blocks of a prompt."""
        chains = dict.fromkeys(PROMPTS[prompt][: n * BLOCK] for n in range(1, blocks + 1))
        fresh = [chain for chain in chains if chain not in self.held[pod]]
        self.publish_events(pod, [_stored(chain) for chain in fresh])
        self.held[pod].update(fresh)

    def remove(self, pod: str, prompt: int, blocks: int) -> None:
        """The pod evicts one block."""
        chain = PROMPTS[prompt][: blocks * BLOCK]
        if chain in self.held[pod]:
            self.publish_events(pod, [BlocksRemoved(block_hashes=(hash(chain),))])
            self.held[pod].discard(chain)

    def clear(self, pod: str) -> None:
        """The pod's cache is reset."""
        self.publish_events(pod, [BlocksCleared()])
        self.events[pod].clear()
        self.held[pod].clear()

    def restart(self, pod: str) -> None:
        """The engine restarts."""
        for publisher in self.publishers[pod]:
            publisher.restarted()
        self.events[pod].clear()
        self.held[pod].clear()

    def swap(self, pod: str) -> None:
        """Other weights under the same name: a new generation without blocks."""
        for publisher in self.publishers[pod]:
            publisher.stop()
        self.publishers[pod].clear()
        self.events[pod].clear()
        self.held[pod].clear()
        self.generation[pod] = GENERATIONS[1 - GENERATIONS.index(self.generation[pod])]
        self.publish(pod)

    async def tamper(self, pod: str) -> None:
        """Blocks are removed from Redis, as by an eviction."""
        scope = scope_of(self.generation[pod])
        async for key in self.connection.client.scan_iter(f"{self.keys.namespace}:1:{{{scope}}}:blocks:{pod}:*"):
            await self.connection.client.spop(key)

    async def lose_everything(self) -> None:
        """Redis comes back empty."""
        async for key in self.connection.client.scan_iter(f"{self.keys.namespace}:*"):
            await self.connection.client.delete(key)

    async def lose_log(self) -> None:
        """The log is trimmed before it was read."""
        for generation in GENERATIONS:
            await self.connection.client.xtrim(self.keys.log(scope_of(generation)), maxlen=0, approximate=False)

    def publish_events(self, pod: str, events: list[KvEvent]) -> None:
        self.events[pod] += events
        for publisher in self.publishers[pod]:
            publisher.apply(events)

    def expected(self, prompt: int) -> dict[str, int]:
        """Leading blocks by pod, according to the model."""
        tokens = PROMPTS[prompt]
        runs = {}
        for pod in PODS:
            run = 0
            while (run + 1) * BLOCK <= len(tokens) and tokens[: (run + 1) * BLOCK] in self.held[pod]:
                run += 1
            if run:
                runs[pod] = run
        return runs

    async def agrees(self) -> bool:
        """Whether replica and Redis match every prompt as the model does, under each generation."""
        for number, tokens in enumerate(PROMPTS):
            for generation in GENERATIONS:
                prefix = _prefix(generation, tokens)
                match = self.replica.match(prefix, 0.0)
                if {pod: sum(run) for pod, run in match.blocks.items()} != self.expected(number):
                    return False
                if await self.in_redis(prefix) != self.expected(number):
                    return False
        return True

    async def in_redis(self, prefix: PromptPrefix) -> dict[str, int]:
        """Leading blocks by pod, read from Redis alone."""
        found = {}
        for generation, hashes in hashes_by_generation(prefix, GENERATIONS):
            for pod, row in (await self.reader.rows(generation)).items():
                pieces = [blocks async for _, _, blocks in self.reader.blocks(generation, pod, row)]
                held = set(chain.from_iterable(pieces))
                if blocks := len(list(takewhile(held.__contains__, hashes))):
                    found[pod] = blocks
        return found

    async def converge(self) -> None:
        """Wait until all agree; assert otherwise."""
        self.replica.mark_current(0.0)
        for _ in range(400):
            if await self.agrees():
                return
            await asyncio.sleep(0.01)
        found = [self.replica.match(_prefix(GENERATIONS[0], tokens), 0.0).blocks for tokens in PROMPTS]
        runs = [{pod: sum(run) for pod, run in blocks.items()} for blocks in found]
        assert runs == [self.expected(number) for number in range(len(PROMPTS))]


def _stored(chain: Chain) -> BlocksStored:
    parent = chain[:-BLOCK]
    return BlocksStored(
        block_hashes=(hash(chain),),
        parent_hash=hash(parent) if parent else None,
        tokens=chain[-BLOCK:],
        block_size_tokens=BLOCK,
    )


def _prefix(generation: Generation, tokens: Chain) -> PromptPrefix:
    flat = token_array(tokens)
    return PromptPrefix(generation, flat, hash_blocks(flat, BLOCK, generation_seed(generation)))


@asynccontextmanager
async def world(server: RedisProcess) -> AsyncIterator[World]:
    """A world that is stopped afterwards."""
    made = World(server)
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        await made.connection.close()


pods, prompts, lengths = st.sampled_from(PODS), st.integers(0, len(PROMPTS) - 1), st.integers(1, 4)
steps = st.one_of(
    st.tuples(st.just("store"), pods, prompts, lengths),
    st.tuples(st.just("store"), pods, prompts, lengths),
    st.tuples(st.just("remove"), pods, prompts, lengths),
    st.tuples(st.sampled_from(["clear", "restart", "swap", "publish", "tamper"]), pods),
    st.tuples(st.sampled_from(["lose_everything", "lose_log", "converge"])),
)


@given(st.lists(steps, max_size=14))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_any_history_converges_to_the_naive_model(
    server: RedisProcess, history: list[tuple[str, *tuple[object, ...]]]
) -> None:
    """Stores, removals, clears, restarts, new weights, second publishers, lost entries, lost keys, a lost Redis.
    Finally every prompt matches what each pod holds, under its own generation and epoch only."""
    async with world(server) as made:
        for what, *arguments in [*history, ("converge",)]:
            done = getattr(made, what)(*arguments)
            if done is not None:
                await done


async def test_another_generation_never_matches(server: RedisProcess) -> None:
    """Another model name, tokenizer, block size, adapter or salt."""
    async with world(server) as made:
        made.store("a", 0, 4)
        await made.converge()
        own = GENERATIONS[0]
        for other in (
            replace(own, model="n"),
            replace(own, tokenizer="t"),
            replace(own, adapter="lora"),
            replace(own, salt="tenant"),
        ):
            assert made.replica.match(_prefix(other, PROMPTS[0]), 0.0).blocks == {}
