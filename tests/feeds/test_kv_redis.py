"""A router's replica compared with what publishers wrote, with lost entries and outages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from router.feeds import kv_redis
from router.feeds.kv_redis import COPY_BLOCKS, IndexFeed
from router.index.cluster import ClusterIndex, EntryKind
from router.index.holders import HolderFacts, KnownHolder, holder_name
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import ReplicaStore
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys, scope_of
from router.types import BlockChange, BlockHash, Generation, PrefixMatch, PromptPrefix, Tier
from tests.kit.deadlines import DEADLINE_S, running
from tests.kit.scenes import make_pod
from tests.redis_process import RedisProcess, address_of, redis_process

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("test")
GENERATION = Generation(model="demo", tokenizer="t")
LOG = KEYS.log(scope_of(GENERATION))
LARGE = 50_000


@dataclass(slots=True)
class HolderPublisher:
    """Writes one holder; each call is one log entry."""

    writer: HolderWriter
    pod: str

    async def begin(self, kind: EntryKind = EntryKind.EMPTY) -> None:
        await self.writer.begin(kind, HolderFacts(url=f"http://{self.pod}"), take_over=True)

    async def store(self, blocks: Sequence[BlockHash], *, seal: bool = False) -> None:
        kind = EntryKind.SEAL if seal else EntryKind.CHANGE
        change = BlockChange(Tier.GPU, True, blocks)
        assert await self.writer.apply([change], complete=True, kind=kind) is WriteResult.OK

    async def remove(self, blocks: Sequence[BlockHash]) -> None:
        assert await self.writer.apply([BlockChange(Tier.GPU, False, blocks)], complete=True) is WriteResult.OK


class LossyConnection(RedisConnection):
    """Deletes log entries in the transaction that writes them, unless `delivers`."""

    delivers = True

    async def script(self, lua: str, keys: Sequence[str], args: Sequence[object], suffix: str = "") -> Any:
        if self.delivers:
            return await super().script(lua, keys, args, suffix)
        async with self.client.pipeline(transaction=True) as both:
            both.eval(lua, len(keys), *keys, *args)
            both.xtrim(LOG, maxlen=0, approximate=False)
            return (await both.execute())[0]


class Scene:
    """A server, a router's replica, and publishers."""

    def __init__(self, server: RedisProcess, client: Any, holder_ttl_s: float = 300.0, timeout_s: float = 20.0) -> None:
        self.server = server
        self.redis = client
        self.index = ClusterIndex(holder_ttl_s=holder_ttl_s)
        self.store = ReplicaStore(self.index, max_age_s=60.0)
        self.wire = LossyConnection(address_of(server.url, timeout_s=DEADLINE_S))
        self.connection = RedisConnection(address_of(server.url, timeout_s=timeout_s))
        wanted = lambda generation: generation.model == "demo"  # noqa: E731
        self.feed = IndexFeed(IndexReader(self.connection, KEYS), self.store, wanted, refresh_s=0.05)

    async def publishing(
        self, pod: str, blocks: Sequence[BlockHash], generation: Generation = GENERATION
    ) -> HolderPublisher:
        """A publisher with these blocks, whose pod the router knows."""
        self.store.add_holder(make_pod(pod), generation)
        publisher = HolderPublisher(HolderWriter(self.wire, KEYS, generation, pod, holder_ttl_s=300.0), pod)
        await publisher.begin()
        await publisher.store(blocks)
        return publisher

    def known(self, pod: str, generation: Generation = GENERATION) -> KnownHolder | None:
        return self.index.holders.get(holder_name(generation, pod))

    def has(self, pod: str, blocks: Iterable[BlockHash], generation: Generation = GENERATION) -> bool:
        """Whether the replica has exactly these blocks of a pod."""
        known, prompt = self.known(pod, generation), PromptPrefix(generation, (), list(blocks))
        if known is None or self.index.masks.held(known.name) != len(prompt.hashes):
            return False
        return self.index.match(prompt).get(pod, (0,))[Tier.GPU] == len(prompt.hashes)

    def match(self, blocks: Iterable[BlockHash], in_s: float = 0.0) -> PrefixMatch:
        """The match of a request in `in_s` seconds."""
        return self.store.match(PromptPrefix(GENERATION, (), list(blocks)), time.monotonic() + in_s)

    def in_contact_since(self, when_s: float) -> bool:
        now_s = time.monotonic()
        return now_s - self.store.age_s(now_s) > when_s


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """Nothing published or read yet. Indirect parameters are passed to the scene."""
    with redis_process() as server, redis.Redis.from_url(server.url) as client:
        scene = Scene(server, client, **getattr(request, "param", {}))
        yield scene
        await scene.wire.close()
        await scene.connection.close()


async def until(condition: Callable[[], object]) -> None:
    """Poll. Raises `TimeoutError` after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.sleep(0.003)  # at first as well, so that the feed is idle again and ends at once
        while not condition():
            await asyncio.sleep(0.003)


# --- news ---


async def test_the_replica_has_earlier_blocks_and_every_later_change(scene: Scene) -> None:
    """And the state of each holder."""
    pod = await scene.publishing("a", [1, 2, 3])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        assert scene.has("a", [1, 2, 3])
        await pod.store([4])
        await pod.remove([1, 2])
        await until(lambda: scene.has("a", [3, 4]))
        other = await scene.publishing("b", [5])
        await until(lambda: scene.has("b", [5]))
        await other.writer.retire()
        await until(lambda: scene.known("b") is None)
        await pod.writer.beat(complete=False)
        await until(lambda: (known := scene.known("a")) and not known.complete)

        found = scene.match([3, 4])
    assert (found.blocks, found.degraded) == ({"a": (2, 0, 0, 0)}, False)


async def test_a_reload_is_visible_after_its_seal(scene: Scene) -> None:
    """The old blocks stay until then."""
    pod = await scene.publishing("a", [1, 2])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        await pod.begin(EntryKind.RELOAD)
        await pod.store([3])
        await until(lambda: (known := scene.known("a")) and known.reloading and known.seq == 1)
        assert scene.has("a", [1, 2])
        await pod.store([4], seal=True)
        await until(lambda: scene.has("a", [3, 4]))


async def test_an_empty_epoch_is_visible_at_once(scene: Scene) -> None:
    pod = await scene.publishing("a", [1, 2])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        await pod.begin(EntryKind.EMPTY)
        await until(lambda: (known := scene.known("a")) and known.epoch == pod.writer.epoch)
        assert scene.match([1, 2]).blocks == {}


@pytest.mark.parametrize("scene", [{"holder_ttl_s": 3.0}], indirect=True)
async def test_only_the_holder_without_heartbeat_expires(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test: a machine may pause for longer than any TTL."""
    now_s = time.monotonic()
    monkeypatch.setattr(kv_redis, "time", SimpleNamespace(monotonic=lambda: now_s))
    await scene.publishing("a", [1])
    alive = await scene.publishing("b", [2])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        for _ in range(3):
            now_s += 0.9
            await alive.writer.beat(complete=True)
            await until(lambda: (known := scene.known("b")) and known.last_seen_s == now_s)  # noqa: B023
        assert scene.known("a")
        now_s += 0.4
        await until(lambda: not scene.known("a"))

        assert scene.has("b", [2])


async def test_only_wanted_generations_are_followed(scene: Scene) -> None:
    """Including those that appear later."""
    await scene.publishing("a", [1], replace(GENERATION, model="other"))
    await scene.publishing("b", [2])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        later = replace(GENERATION, revision="later")
        await scene.publishing("c", [3], later)
        await until(lambda: scene.has("c", [3], later) and scene.has("b", [2]))

        assert {known.id for known in scene.index.holders} == {"b", "c"}


# --- what is lost on the way ---


@pytest.mark.parametrize("next_entry", ["heartbeat", "change"])
async def test_only_the_holder_with_lost_entries_is_read_again(scene: Scene, next_entry: str) -> None:
    """Once."""
    pod = await scene.publishing("a", [1, 2])
    await scene.publishing("b", [1])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        scene.wire.delivers = False
        await pod.store([3])
        await pod.remove([1])
        scene.wire.delivers = True
        await (pod.writer.beat(complete=True) if next_entry == "heartbeat" else pod.store([]))

        await until(lambda: scene.has("a", [2, 3]))
        await pod.store([4])
        await until(lambda: scene.has("a", [2, 3, 4]))
        assert scene.feed.holders_read == 3
        assert scene.has("b", [1])


async def test_unreadable_entries_are_skipped(scene: Scene) -> None:
    pod = await scene.publishing("a", [1])
    understood = {"k": "change", "h": "a", "e": pod.writer.epoch, "s": 2}
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        for strange in (
            {"k": "merge"},
            {"h": b"\xff"},
            {"e": "later"},
            {"+0": b"1234567"},
            {"k": "reload", "e": pod.writer.epoch + 1, "f": "{"},
            {"k": "reload", "e": pod.writer.epoch + 1, "f": '{"url": 1}'},
        ):
            scene.redis.xadd(LOG, understood | strange)
        scene.redis.xadd(LOG, {"nothing": "known"})
        await pod.store([2])

        await until(lambda: scene.has("a", [1, 2]))
        assert scene.feed.holders_read == 1


async def test_unreadable_rows_are_skipped(scene: Scene) -> None:
    """Other holders and generations are read."""
    await scene.publishing("a", [1])
    scope = scope_of(GENERATION)
    scene.redis.zadd(KEYS.scopes, {"nonsense": time.time(), "{}": time.time()})
    scene.redis.zadd(KEYS.holders(scope), {b"\xff": 0, "b": 0, "gone": 0})
    scene.redis.hset(KEYS.holder(scope, "b"), mapping={"epoch": "1", "facts": "{"})
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()

        assert [known.id for known in scene.index.holders] == ["a"]


async def test_an_unreadable_generation_is_logged_once(scene: Scene) -> None:
    """Generations are read again and again."""
    scene.redis.zadd(KEYS.scopes, {"nonsense": time.time(), "{}": time.time()})
    reader = IndexReader(scene.connection, KEYS)
    with capture_logs() as lines:
        for _ in range(3):
            assert await reader.generations() == []
    assert [line["event"] for line in lines] == ["skipping unreadable index entry"] * 2


# --- a large holder ---


async def _changes(pod: HolderPublisher) -> list[BlockHash]:
    for start in range(1, 500, 100):
        await pod.remove(range(start, start + 100))
        await pod.store(range(LARGE + start, LARGE + start + 100))
    await pod.store(range(1, 50))
    return [*range(1, 50), *range(501, LARGE + 501)]


async def _restart(pod: HolderPublisher) -> list[BlockHash]:
    await pod.begin(EntryKind.EMPTY)
    await pod.store(range(5, 10))
    return [*range(5, 10)]


async def _reload(pod: HolderPublisher) -> list[BlockHash]:
    await pod.begin(EntryKind.RELOAD)
    await pod.store(range(1, 100))
    await pod.store(range(100, 200), seal=True)
    return [*range(1, 200)]


@pytest.mark.parametrize("happen", [_changes, _restart, _reload])
async def test_changes_during_the_read_of_a_large_holder_are_applied(
    scene: Scene, happen: Callable[[HolderPublisher], Coroutine[Any, Any, list[BlockHash]]]
) -> None:
    pod = await scene.publishing("a", [])
    for start in range(1, LARGE, 2500):
        await pod.store(range(start, start + 2500))
    async with running(scene.feed.run()):
        await until(lambda: scene.index.masks.block_holders)
        assert not scene.feed.loaded.is_set()
        blocks = await happen(pod)
        await until(lambda: scene.has("a", blocks))


async def test_reading_a_large_holder_yields_to_requests(scene: Scene) -> None:
    pod = await scene.publishing("a", [])
    for start in range(1, LARGE, 2500):
        await pod.store(range(start, start + 2500))
    known = [0]
    async with running(scene.feed.run()):
        while not scene.feed.loaded.is_set():
            known.append(scene.index.masks.block_holders)
            await asyncio.sleep(0)
    assert known[-1] == LARGE and max(after - before for before, after in pairwise(known)) <= COPY_BLOCKS


# --- Redis itself ---


async def test_during_an_outage_the_replica_answers_with_its_age(scene: Scene) -> None:
    """Degraded, up to a maximum age; afterwards the replica is current again."""
    pod = await scene.publishing("a", [1, 2, 3])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        scene.server.kill()
        await until(lambda: scene.match([1], in_s=-scene.store.age_s(time.monotonic())).degraded)  # however young
        soon, later = scene.match([1, 2, 3]), scene.match([1, 2, 3], in_s=30.0)
        assert soon.blocks == later.blocks == {"a": (3, 0, 0, 0)}
        assert scene.match([1, 2, 3], in_s=61.0).blocks == {}

        scene.server.start()
        back_s = time.monotonic()
        await until(lambda: scene.in_contact_since(back_s))
        assert scene.has("a", [1, 2, 3])
        await pod.begin(EntryKind.RELOAD)
        await pod.store([1, 2, 5], seal=True)
        await until(lambda: scene.has("a", [1, 2, 5]) and not scene.match([1]).degraded)


async def test_a_deleted_log_is_followed_from_its_new_start(scene: Scene) -> None:
    pod = await scene.publishing("a", [1, 2, 3])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        scene.redis.flushall()
        await pod.begin(EntryKind.RELOAD)
        await pod.store([3, 4], seal=True)
        await until(lambda: scene.has("a", [3, 4]))


@pytest.mark.parametrize("scene", [{"timeout_s": 0.3}], indirect=True)
async def test_a_log_without_entries_keeps_the_replica_current(scene: Scene) -> None:
    """For any timeout."""
    await scene.publishing("a", [1])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        loaded_s = time.monotonic()
        await until(lambda: scene.in_contact_since(loaded_s))
