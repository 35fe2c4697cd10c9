"""Hits of pods with windows and states through Redis: sessions recorded on real engines, from publisher to replica."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

import pytest
import redis

from loadtest.mock_engine.event_publisher import encode_batch
from router.config.index_schema import Publish
from router.feeds.kv_redis import IndexFeed
from router.feeds.self_test import HitTest, SelfTestTiming
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.cluster import ClusterIndex
from router.index.hit_probe import CacheHabits
from router.index.holders import HolderFacts, KnownHolder
from router.publisher.published_holder import PublishedHolder
from router.stores.holder_writer import HolderWriter
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import ReplicaStore
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys, decode_row, scope_of, unpack_blocks
from router.types import Generation, KvEvent, LayerType, Pod, PromptPrefix, Tier
from tests.index.decoding import decode_batch
from tests.index.recorded_sessions import WITH_FULL_ATTENTION, Sent, block_tokens, needs_sessions, requests
from tests.kit.deadlines import DEADLINE_S
from tests.kit.layered_pool import AHEAD, DENSE, DROPS, FULL, pod_of, served, window
from tests.kit.scenes import fleet_of, make_pod
from tests.redis_process import RedisProcess, address_of

pytestmark = [pytest.mark.anyio, pytest.mark.net]

POD = "pod"
SETTINGS = Publish(heartbeat_s=0.03, flush_interval_ms=0.001, reload_jitter_s=0.0)
NAMESPACES = count()
Session: TypeAlias = dict[str, Any]


class World:
    """One pod with a publisher, and routers that read Redis only."""

    def __init__(self, server: RedisProcess, session: Session) -> None:
        self.keys = Keys(f"layers{next(NAMESPACES)}")
        self.sent = list(requests(session))
        self.block = block_tokens(session)
        self.generation = Generation(model="m", block_size_tokens=self.block)
        self.connection = RedisConnection(address_of(server.url, timeout_s=20))
        self.redis: Any = redis.Redis.from_url(server.url)
        self.events: list[KvEvent] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.publish()

    def publish(self) -> None:
        """Start a publisher that has all events, as after a replay; it takes over."""
        writer = HolderWriter(self.connection, self.keys, self.generation, POD, 30.0)
        self.publisher = PublishedHolder(writer, HolderFacts(url=f"http://{POD}"), SETTINGS, start_s=5.0)
        self.publisher.apply(self.events)
        self.publisher.caught_up(complete=True)
        self.tasks.append(asyncio.create_task(self.publisher.run()))

    def router(self) -> ReplicaStore:
        """Start a router that knows nothing yet."""
        store = ReplicaStore(ClusterIndex(holder_ttl_s=60), max_age_s=60)
        store.add_holder(make_pod(POD), self.generation)
        feed = IndexFeed(IndexReader(self.connection, self.keys), store, lambda _: True, refresh_s=0.01)
        self.tasks.append(asyncio.create_task(feed.run()))
        return store

    def apply(self, request: Sent) -> None:
        for batch in request.batches:
            self.events += decode_batch(batch)
            self.publisher.apply(decode_batch(batch))

    def hit(self, store: ReplicaStore | BlockMap, request: Sent) -> int:
        generation = Generation(model="m", block_size_tokens=self.block, salt=request.salt)
        tokens = token_array(request.prompt)
        prefix = PromptPrefix(generation, tokens, hash_blocks(tokens, self.block, generation_seed(generation)))
        found = store.match(prefix) if isinstance(store, BlockMap) else store.match(prefix, time.monotonic()).blocks
        return self.block * sum(found.get(POD, (0,)))

    def hits(self, store: ReplicaStore | BlockMap) -> list[int]:
        return [self.hit(store, request) for request in self.sent]

    async def expects(self, store: ReplicaStore, sent: Sequence[Sent], hits: Sequence[int]) -> None:
        """The router expects these hits, after a while."""
        await until(lambda: [self.hit(store, request) for request in sent] == hits)

    def local(self) -> BlockMap:
        """What a router has that receives the events itself."""
        blocks = BlockMap()
        blocks.add_holder(POD, self.generation)
        for event in self.events:
            blocks.apply(POD, event)
        return blocks


@pytest.fixture
async def worlds(server: RedisProcess) -> AsyncIterator[Callable[[Session], World]]:
    made: list[World] = []

    def make(session: Session) -> World:
        made.append(World(server, session))
        return made[-1]

    yield make
    for world in made:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)
        await world.connection.close()
        world.redis.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def published(store: ReplicaStore) -> KnownHolder:
    known = store.index.holders.publisher_of(POD)
    assert known is not None
    return known


@pytest.mark.parametrize("session", WITH_FULL_ATTENTION, ids=lambda session: session["name"])
async def test_every_request_hits_what_a_router_expects_that_reads_redis(
    worlds: Callable[[Session], World], session: Session
) -> None:
    """Also a router that starts later, and those that see a publisher write all again."""
    world = worlds(session)
    router = world.router()
    for request in world.sent:
        await world.expects(router, [request], [request.cached_tokens])
        world.apply(request)
    local = world.local()
    expected, late = world.hits(local), world.router()
    for store in (router, late):
        await world.expects(store, world.sent, expected)
        assert store.cache_of(POD).hits == local.cache_of(POD).hits
    epoch = published(late).epoch
    world.publish()
    await until(lambda: published(late).epoch > epoch and not published(late).reloading)
    for store in (router, late, world.router()):
        await world.expects(store, world.sent, expected)


@needs_sessions
async def test_hashes_that_include_the_next_token_pass_through_redis(worlds: Callable[[Session], World]) -> None:
    """The same requests to a mock engine that looks ahead: the publisher learns it from events."""
    session = WITH_FULL_ATTENTION[0]
    world = worlds(session)
    pod = pod_of((*[window(128)] * 5, FULL), AHEAD, world.block)
    router = world.router()
    for sent, step in zip(world.sent, session["steps"], strict=True):
        cached, events = served(pod, sent.prompt, step["output"], sent.salt)
        await world.expects(router, [sent], [cached])
        world.apply(sent._replace(batches=[encode_batch(events, "map", 0.0)]))
    assert published(router).facts.ahead_tokens == 1
    await world.expects(world.router(), world.sent, world.hits(world.local()))


@pytest.mark.parametrize(
    ("groups", "habits", "hits"),
    [
        ((FULL,), DROPS, "full, drops a block"),
        ((window(128), FULL), DROPS, "full + window 128, checkpoints, drops a block"),
        ((window(128), FULL), DENSE, "full + window 128"),
    ],
)
@needs_sessions
async def test_what_a_test_shows_of_a_pod_counts_where_only_a_publisher_reads_its_events(
    worlds: Callable[[Session], World], groups: Sequence[LayerType], habits: CacheHabits, hits: str
) -> None:
    """Each request to a mock engine hits what a router expects that reads Redis alone."""
    session = WITH_FULL_ATTENTION[0]
    world, fleet = worlds(session), fleet_of(make_pod(POD, models=("m",)))
    pod, router = pod_of(groups, habits, world.block), world.router()

    def publish(events: Sequence[KvEvent]) -> None:
        world.apply(Sent([], "", 0, [encode_batch(events, "map", 0.0)]))

    async def post(_: Pod, _path: str, body: Mapping[str, Any], _timeout_s: float) -> bytes:
        cached, events = served(pod, body["prompt"], [1])
        publish(events)
        return json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}}).encode()

    publish(served(pod, world.sent[0].prompt, [1])[1])
    rule = hits.partition(",")[0]
    await until(lambda: router.cache_of(POD).announced_rule and router.cache_of(POD).hits == f"{rule}, by events")
    feed = HitTest(fleet, router, post, lambda _: True, SelfTestTiming())
    assert await feed.test(fleet.snapshot.pods[0].pod)
    assert router.cache_of(POD).hits == hits
    for sent, step in zip(world.sent[1:], session["steps"][1:], strict=True):
        cached, events = served(pod, sent.prompt, step["output"], sent.salt)
        await world.expects(router, [sent], [cached])
        publish(events)
    epoch = published(router).epoch
    world.publish()
    await until(lambda: published(router).epoch > epoch and not published(router).reloading)
    cached, _ = served(pod, world.sent[-1].prompt, [1])
    await world.expects(router, world.sent[-1:], [cached])


@needs_sessions
async def test_other_versions_read_full_attention_alone(worlds: Callable[[Session], World]) -> None:
    """They know the sets and counts of tiers; those of layers have other names."""
    world = worlds(WITH_FULL_ATTENTION[0])
    router = world.router()
    for request in world.sent:
        world.apply(request)
    await until(lambda: world.hits(router) == world.hits(world.local()))
    scope = scope_of(world.generation)
    row = decode_row(world.redis.hgetall(world.keys.holder(scope, POD)))
    blocks = unpack_blocks(b"".join(world.redis.smembers(world.keys.blocks(scope, POD, row.epoch, Tier.GPU))))
    assert set(blocks) == set(world.publisher.blocks.held()[Tier.GPU])
    assert row.blocks == (len(blocks), 0, 0, 0)


@needs_sessions
async def test_a_lost_block_of_a_window_is_noticed(worlds: Callable[[Session], World]) -> None:
    """The number of blocks is checked in each type of layers; then all are written again."""
    world = worlds(WITH_FULL_ATTENTION[0])
    router = world.router()
    for request in world.sent:
        world.apply(request)
    await until(lambda: world.hits(router) == world.hits(world.local()))
    before = published(router).epoch
    key = world.keys.blocks(scope_of(world.generation), POD, before, Tier.GPU, 1)
    assert world.redis.spop(key)
    await until(lambda: published(router).epoch > before)
    await until(lambda: world.hits(router) == world.hits(world.local()))
