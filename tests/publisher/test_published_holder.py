"""Does what a holder tells lie in Redis, exactly, whatever happens to Redis, to its publisher, or between them?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.publisher.published_holder import MAX_WRITE_BLOCKS, PublishedHolder, PublishState, PublishTiming
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.redis_connection import RedisConnection, parse_url
from router.stores.redis_schema import HolderRow, Keys, decode_row, pack_blocks, scope_of, unpack_blocks
from router.types import BlockChange, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, Generation, Tier
from tests.redis_process import RedisProcess, redis_process

pytestmark = [pytest.mark.anyio, pytest.mark.net]

DEADLINE_S = 30.0
KEYS = Keys("test")
GENERATION = Generation(model="demo", tokenizer="t", block_size_tokens=4)
SCOPE = scope_of(GENERATION)
POD = "pod"
FACTS = HolderFacts(url="http://pod")
ROW, LOG = KEYS.holder(SCOPE, POD), KEYS.log(SCOPE)
LASTING = PublishTiming(lifetime_s=8.0, beat_s=0.1, flush_interval_s=0.002, start_s=0.05, reload_jitter_s=0.02)
SHORT = PublishTiming(lifetime_s=0.5, beat_s=0.1, flush_interval_s=0.002, start_s=0.05, reload_jitter_s=0.02)


def stored(chat: int, blocks: int = 3, tier: Tier = Tier.GPU) -> BlocksStored:
    """The engine stores a conversation of so many blocks."""
    named, tokens = tuple(range(chat * 10**6, chat * 10**6 + blocks)), [chat] * 4 * blocks
    return BlocksStored(block_hashes=named, parent_hash=None, tokens=tokens, block_size_tokens=4, tier=tier)


def removed(chat: int, blocks: int = 3, tier: Tier = Tier.GPU) -> BlocksRemoved:
    """The engine evicts what `stored` stored."""
    return BlocksRemoved(block_hashes=stored(chat, blocks).block_hashes, tier=tier)


def hashes(chat: int, blocks: int = 3) -> set[BlockHash]:
    """The router's hashes of a conversation."""
    return set(hash_blocks(token_array([chat] * 4 * blocks), 4, generation_seed(GENERATION)))


@dataclass(slots=True)
class Scene:
    """A server, and publishers of one holder."""

    server: RedisProcess
    redis: Any
    connection: RedisConnection
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def publication(self, lifetime_s: float = 8.0) -> HolderWriter:
        return HolderWriter(self.connection, KEYS, GENERATION, POD, lifetime_s)

    def publish(self, timing: PublishTiming = LASTING) -> PublishedHolder:
        """One more publisher of the holder. Its task is the last one."""
        holder = PublishedHolder(self.publication(timing.lifetime_s), FACTS, timing)
        self.tasks.append(asyncio.create_task(holder.run()))
        return holder

    def row(self) -> HolderRow | None:
        fields = self.redis.hgetall(ROW)
        return decode_row(fields) if fields else None

    def held(self) -> dict[Tier, set[BlockHash]]:
        """What lies in Redis, which must be as much as the row says."""
        row = self.row()
        if row is None:
            return {}
        keys = [KEYS.blocks(SCOPE, POD, row.epoch, tier) for tier in Tier]
        lying = {tier: set(unpack_blocks(b"".join(self.redis.smembers(keys[tier])))) for tier in Tier}
        counts = tuple(map(len, lying.values()))
        return {tier: blocks for tier, blocks in lying.items() if blocks} if row.blocks == counts else {}

    def blocks_key(self, tier: Tier = Tier.GPU) -> str:
        """Where the blocks lie now."""
        row = self.row()
        assert row is not None
        return KEYS.blocks(SCOPE, POD, row.epoch, tier)

    def has(self, *chats: int) -> bool:
        """Are the blocks of exactly these conversations in Redis, all on the GPU?"""
        return self.held() == {Tier.GPU: set().union(*map(hashes, chats))}

    def told(self) -> Counter[str]:
        """Entries of the log, by kind."""
        return Counter(fields[b"k"].decode() for _, fields in self.redis.xrange(LOG))


async def until(condition: Callable[[], object]) -> None:
    """Ask again and again; a server that cannot be asked is a no. Raises `TimeoutError` after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(RedisError, OSError):
                if condition():
                    return
            await asyncio.sleep(0.005)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A server; nobody publishes yet."""
    with redis_process() as server, redis.Redis.from_url(server.url, socket_timeout=2.0) as client:
        scene = Scene(server, client, RedisConnection(parse_url(server.url), timeout_s=0.2))
        yield scene
        for task in scene.tasks:
            task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*scene.tasks, return_exceptions=True)
        await scene.connection.close()


async def publishing(scene: Scene, *chats: int, timing: PublishTiming = LASTING) -> PublishedHolder:
    """A publisher that has written these conversations."""
    holder = scene.publish(timing)
    holder.apply([stored(chat) for chat in chats])
    holder.caught_up(complete=True)
    await until(lambda: holder.state is PublishState.PUBLISHING and scene.has(*chats) and not holder.pending_blocks)
    return holder


# --- what the source tells ---


async def test_what_is_announced_lies_in_redis_by_tier_and_counted(scene: Scene) -> None:
    """Every stored block is a member of its tier's set, every removed one is not, and the row has their numbers."""
    holder = await publishing(scene, 1, 2)
    holder.apply([stored(3, 5), stored(1, tier=Tier.CPU), removed(2)])

    await until(lambda: scene.held() == {Tier.GPU: hashes(1) | hashes(3, 5), Tier.CPU: hashes(1)})
    assert (row := scene.row()) and (row.blocks, row.facts) == ((8, 3, 0, 0), FACTS)


async def test_what_came_and_went_at_once_is_never_written(scene: Scene) -> None:
    """Changes that cancel out leave no trace: neither in the sets nor in the log."""
    holder = await publishing(scene, 1)
    await until(lambda: holder.counts.blocks)
    before = holder.counts.blocks
    holder.apply([stored(2), removed(2), removed(1), stored(1)])
    holder.apply([stored(3)])

    await until(lambda: scene.has(1, 3) and holder.counts.blocks > before)
    assert holder.counts.blocks - before == 3


async def test_a_holder_larger_than_one_write_comes_in_pieces_and_is_sealed_last(scene: Scene) -> None:
    """A reload is some changes and one seal; what changes meanwhile is right in the end."""
    holder = scene.publish()
    blocks = 3 * MAX_WRITE_BLOCKS
    holder.apply([stored(1, blocks)])
    holder.caught_up(complete=True)
    await until(lambda: scene.told()["change"])
    assert not scene.told()["seal"]
    holder.apply([removed(1, blocks), stored(2), stored(1, 7)])

    await until(lambda: scene.held() == {Tier.GPU: hashes(1, 7) | hashes(2)})
    assert scene.told()["seal"] == 1


@pytest.mark.parametrize(
    "restart", [PublishedHolder.restarted, partial(PublishedHolder.apply, events=[BlocksCleared()])]
)
async def test_a_restart_begins_an_empty_epoch(scene: Scene, restart: Callable[[PublishedHolder], None]) -> None:
    """Nothing of the epoch before is left; what is stored from then on is there."""
    holder = await publishing(scene, 1, 2)
    old = scene.row()
    holder.apply([stored(4)])
    restart(holder)
    holder.apply([stored(3)])

    await until(lambda: scene.has(3))
    assert old is not None
    assert not any(scene.redis.exists(KEYS.blocks(SCOPE, POD, old.epoch, tier)) for tier in Tier)
    assert scene.told()["empty"] == 1


async def test_stop_takes_the_holder_out(scene: Scene) -> None:
    """Row, blocks and name are gone at once, and the log says so."""
    holder = await publishing(scene, 1)
    holder.stop()

    await until(lambda: scene.tasks[0].done())
    assert set(scene.redis.keys()) == {KEYS.scopes.encode(), LOG.encode()}
    assert scene.redis.xrevrange(LOG, count=1)[0][1][b"k"] == b"gone"


async def test_that_events_are_lost_is_told(scene: Scene) -> None:
    """An incomplete holder is marked without waiting for a heartbeat, and no longer when all is known again."""
    holder = await publishing(scene, 1, timing=replace(LASTING, beat_s=60.0))
    for complete in (False, True):
        holder.caught_up(complete=complete)
        await until(lambda: (row := scene.row()) and row.complete is complete)  # noqa: B023


# --- who publishes ---


async def test_the_newest_publisher_writes_and_the_other_comes_back_when_it_dies(scene: Scene) -> None:
    """A second publisher takes over; the first stands by until the second was silent for a lifetime."""
    first = await publishing(scene, 1, timing=SHORT)
    await publishing(scene, 1, 2, timing=SHORT)
    await until(lambda: first.state is PublishState.STANDBY)
    first.apply([stored(3)])
    scene.tasks[1].cancel()

    await until(lambda: scene.has(1, 3) and first.state is PublishState.PUBLISHING)


async def test_a_publisher_that_stands_by_does_not_take_the_holder_out(scene: Scene) -> None:
    """Only who publishes retires."""
    first = await publishing(scene, 1)
    await publishing(scene, 2)
    await until(lambda: first.state is PublishState.STANDBY)
    first.stop()

    await until(lambda: scene.tasks[0].done() and scene.has(2))


# --- what happens to Redis ---


def _restart(scene: Scene) -> None:
    scene.server.kill()
    scene.server.start()


LOSSES: dict[str, Callable[[Scene], object]] = {
    "killed and restarted": _restart,
    "flushed": lambda scene: scene.redis.flushall(),
    "a block removed": lambda scene: scene.redis.srem(scene.blocks_key(), pack_blocks(list(hashes(1))[:1])),
    "a block slipped in": lambda scene: scene.redis.sadd(scene.blocks_key(), b"whatever"),
    "another tier slipped in": lambda scene: scene.redis.sadd(scene.blocks_key(Tier.DISK), b"whatever"),
    "the blocks evicted": lambda scene: scene.redis.delete(scene.blocks_key()),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
async def test_what_redis_lost_is_written_again(scene: Scene, lose: Callable[[Scene], None]) -> None:
    """With the next heartbeat at the latest, Redis is told everything in a new epoch, sealed."""
    holder = await publishing(scene, 1, 2)
    lose(scene)

    await until(lambda: holder.counts.reloads == 2 and not holder.pending_blocks and scene.has(1, 2))
    holder.apply([removed(2)])
    await until(lambda: scene.has(1))


OUTAGES: dict[str, tuple[Callable[[Scene], object], Callable[[Scene], object]]] = {
    "full": (lambda on: on.redis.config_set("maxmemory", 1), lambda on: on.redis.config_set("maxmemory", 0)),
    "a replica": (lambda on: on.redis.replicaof("localhost", 1), lambda on: on.redis.replicaof("NO", "ONE")),
    "hanging": (lambda on: on.server.pause(), lambda on: on.server.resume()),
}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_what_could_not_be_written_is_written_when_it_can(scene: Scene, outage: str) -> None:
    """A full server, one that became a replica, one that hangs: the publisher says so, goes on trying, and is right."""
    disturb, mend = OUTAGES[outage]
    holder = await publishing(scene, 1, 2)
    disturb(scene)
    holder.apply([stored(3), removed(1)])
    await until(lambda: holder.state is PublishState.UNREACHABLE and holder.counts.failures >= 2)
    holder.apply([stored(4), removed(3)])
    mend(scene)

    await until(lambda: scene.has(2, 4) and holder.state is PublishState.PUBLISHING)


@pytest.mark.parametrize("outage", ["full", "a replica"])
async def test_a_restart_during_an_outage_of_more_than_a_lifetime_is_not_forgotten(scene: Scene, outage: str) -> None:
    """Redis has lost the holder, and the holder its cache: only what came after is written."""
    disturb, mend = OUTAGES[outage]
    holder = await publishing(scene, 1, 2, timing=SHORT)
    disturb(scene)
    await until(lambda: scene.row() is None and holder.counts.failures)
    holder.restarted()
    holder.apply([stored(3)])
    mend(scene)

    await until(lambda: scene.has(3) and holder.state is PublishState.PUBLISHING)


async def test_a_write_whose_answer_was_lost_costs_no_reload(scene: Scene) -> None:
    """A heartbeat that is due when Redis answers again does not take the write it had done for a difference."""
    holder = await publishing(scene, 1)
    scene.server.pause()
    holder.apply([stored(2)])
    await until(lambda: holder.counts.failures >= 2)
    scene.server.resume()

    await until(lambda: scene.has(1, 2) and holder.state is PublishState.PUBLISHING)
    assert holder.counts.reloads == 1


# --- one write ---


async def test_the_same_write_again_changes_nothing(scene: Scene) -> None:
    """What timed out here but was done there is done once: one entry in the log, the same row, the answer OK."""
    publication = scene.publication()
    await publication.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await publication.apply([], complete=True)  # so that the server knows the script
    change = [BlockChange(Tier.GPU, True, sorted(hashes(1)))]
    scene.server.pause()
    with pytest.raises(RedisError):
        await publication.apply(change, complete=True)
    scene.server.resume()
    await until(lambda: scene.has(1))

    assert await publication.apply(change, complete=True) is WriteResult.OK
    assert (scene.has(1), scene.told()) == (True, {"empty": 1, "change": 2})
    assert await publication.beat(complete=True) is WriteResult.OK


async def test_a_write_that_redis_acknowledged_and_lost_is_noticed(scene: Scene) -> None:
    """The next one does not follow on what a failover has left, and changes nothing."""
    publication = scene.publication()
    await publication.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await publication.apply([BlockChange(Tier.GPU, True, sorted(hashes(1)))], complete=True)
    scene.redis.hset(ROW, "seq", 0)

    assert await publication.apply([BlockChange(Tier.GPU, True, sorted(hashes(2)))], complete=True) is WriteResult.GAP
    assert scene.has(1)


async def test_an_old_epoch_is_fenced(scene: Scene) -> None:
    """Whatever the publisher before says changes nothing: not the blocks, not the lifetime, not the log."""
    old, new = scene.publication(), scene.publication()
    await old.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await new.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await new.apply([BlockChange(Tier.GPU, True, sorted(hashes(1)))], complete=True)
    told = scene.told()

    late = old.apply([BlockChange(Tier.GPU, True, sorted(hashes(2)))], complete=True)
    assert {await late, await old.beat(complete=False), await old.retire()} == {WriteResult.FENCED}
    assert await old.begin(EntryKind.RELOAD, FACTS, take_over=False) is WriteResult.HELD
    assert (scene.has(1), scene.told()) == (True, told)
