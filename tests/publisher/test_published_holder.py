"""A holder's blocks in Redis, during failures of Redis, the publisher and the connection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from router.config.index_schema import Publish
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.publisher.published_holder import MAX_WRITE_BLOCKS, PublishedHolder, PublishState
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import HolderRow, Keys, decode_row, pack_blocks, scope_of, unpack_blocks
from router.types import BlockChange, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, Generation, Tier
from tests.kit.deadlines import DEADLINE_S
from tests.redis_process import RedisProcess, address_of, redis_process

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("test")
GENERATION = Generation(model="demo", tokenizer="t", block_size_tokens=4)
SCOPE = scope_of(GENERATION)
POD = "pod"
FACTS = HolderFacts(url="http://pod")
ROW, LOG = KEYS.holder(SCOPE, POD), KEYS.log(SCOPE)
SETTINGS = Publish(heartbeat_s=0.1, flush_interval_ms=2.0, reload_jitter_s=0.02)
LASTING_S, SHORT_S = 8.0, 0.5
"""Times after which a holder leaves that is not written."""


def stored(chat: int, blocks: int = 3, tier: Tier = Tier.GPU) -> BlocksStored:
    """A stored event of a conversation with this many blocks."""
    named, tokens = tuple(range(chat * 10**6, chat * 10**6 + blocks)), [chat] * 4 * blocks
    return BlocksStored(block_hashes=named, parent_hash=None, tokens=tokens, block_size_tokens=4, tier=tier)


def removed(chat: int, blocks: int = 3, tier: Tier = Tier.GPU) -> BlocksRemoved:
    """The removal of what `stored` stores."""
    return BlocksRemoved(block_hashes=stored(chat, blocks).block_hashes, tier=tier)


def hashes(chat: int, blocks: int = 3) -> set[BlockHash]:
    """The router's hashes of a conversation."""
    return set(hash_blocks(token_array([chat] * 4 * blocks), 4, generation_seed(GENERATION)))


class WriterInTurns(HolderWriter):
    """Writes a piece, and the next one when the test has looked at it."""

    goes_on: asyncio.Event | None = None

    async def apply(self, *changes: Any, **options: Any) -> WriteResult:
        result = await super().apply(*changes, **options)
        if self.goes_on is not None:
            await self.goes_on.wait()
        return result


@dataclass(slots=True)
class Scene:
    """A server, and publishers of one holder."""

    server: RedisProcess
    redis: Any
    connection: RedisConnection
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def writer(self, holder_ttl_s: float = LASTING_S) -> WriterInTurns:
        return WriterInTurns(self.connection, KEYS, GENERATION, POD, holder_ttl_s)

    def publish(
        self, ttl_s: float = LASTING_S, goes_on: asyncio.Event | None = None, settings: Publish = SETTINGS
    ) -> PublishedHolder:
        """Start another publisher of the holder. Its task is the last one."""
        writer = self.writer(ttl_s)
        writer.goes_on = goes_on
        holder = PublishedHolder(writer, FACTS, settings, start_s=0.05)
        self.tasks.append(asyncio.create_task(holder.run()))
        return holder

    def row(self) -> HolderRow | None:
        fields = self.redis.hgetall(ROW)
        return decode_row(fields) if fields else None

    def held(self) -> dict[Tier, set[BlockHash]]:
        """The blocks in Redis, whose number must equal the counts in the row."""
        row = self.row()
        if row is None:
            return {}
        keys = [KEYS.blocks(SCOPE, POD, row.epoch, tier) for tier in Tier]
        lying = {tier: set(unpack_blocks(b"".join(self.redis.smembers(keys[tier])))) for tier in Tier}
        counts = tuple(map(len, lying.values()))
        return {tier: blocks for tier, blocks in lying.items() if blocks} if row.blocks == counts else {}

    def blocks_key(self, tier: Tier = Tier.GPU) -> str:
        """Key of the blocks in the current epoch."""
        row = self.row()
        assert row is not None
        return KEYS.blocks(SCOPE, POD, row.epoch, tier)

    def has(self, *chats: int) -> bool:
        """Whether Redis has exactly the blocks of these conversations, all on the GPU."""
        return self.held() == {Tier.GPU: set().union(*map(hashes, chats))}

    def entry_kinds(self) -> Counter[str]:
        """Log entries by kind."""
        return Counter(fields[b"k"].decode() for _, fields in self.redis.xrange(LOG))


async def until(condition: Callable[[], object]) -> None:
    """Poll; a server that does not answer counts as False. Raises `TimeoutError` after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(RedisError, OSError):
                if condition():
                    return
            await asyncio.sleep(0.005)


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """A server without publishers. The indirect parameter is the time after which these give up an answer: a short one
    where the server hangs; else they wait for a slow machine."""
    with redis_process() as server, redis.Redis.from_url(server.url, socket_timeout=DEADLINE_S) as client:
        scene = Scene(
            server, client, RedisConnection(address_of(server.url, timeout_s=getattr(request, "param", DEADLINE_S)))
        )
        yield scene
        for task in scene.tasks:
            task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*scene.tasks, return_exceptions=True)
        await scene.connection.close()


async def publishing(
    scene: Scene, *chats: int, ttl_s: float = LASTING_S, settings: Publish = SETTINGS
) -> PublishedHolder:
    """A publisher that has written these conversations."""
    holder = scene.publish(ttl_s, settings=settings)
    holder.apply([stored(chat) for chat in chats])
    holder.caught_up(complete=True)
    await until(lambda: holder.state is PublishState.PUBLISHING and scene.has(*chats) and not holder.pending_blocks)
    return holder


# --- events of the source ---


async def test_redis_has_the_announced_blocks_and_counts_by_tier(scene: Scene) -> None:
    holder = await publishing(scene, 1, 2)
    holder.apply([stored(3, 5), stored(1, tier=Tier.CPU), removed(2)])

    await until(lambda: scene.held() == {Tier.GPU: hashes(1) | hashes(3, 5), Tier.CPU: hashes(1)})
    assert (row := scene.row()) and (row.blocks, row.facts) == ((8, 3, 0, 0), FACTS)


async def test_changes_that_cancel_out_are_not_written(scene: Scene) -> None:
    """Neither to the sets nor to the log."""
    holder = await publishing(scene, 1)
    await until(lambda: holder.written_blocks)
    before = holder.written_blocks
    holder.apply([stored(2), removed(2), removed(1), stored(1)])
    holder.apply([stored(3)])

    await until(lambda: scene.has(1, 3) and holder.written_blocks > before)
    assert holder.written_blocks - before == 3


async def test_a_large_holder_is_written_in_pieces_and_sealed_last(scene: Scene) -> None:
    """Concurrent changes are not lost."""
    goes_on = asyncio.Event()
    holder = scene.publish(goes_on=goes_on)
    blocks = 3 * MAX_WRITE_BLOCKS
    holder.apply([stored(1, blocks)])
    holder.caught_up(complete=True)
    await until(lambda: scene.entry_kinds()["change"])
    assert not scene.entry_kinds()["seal"]
    holder.apply([removed(1, blocks), stored(2), stored(1, 7)])
    goes_on.set()

    await until(lambda: scene.held() == {Tier.GPU: hashes(1, 7) | hashes(2)})
    assert scene.entry_kinds()["seal"] == 1


@pytest.mark.parametrize(
    "restart", [PublishedHolder.restarted, partial(PublishedHolder.apply, events=[BlocksCleared()])]
)
async def test_a_restart_starts_an_empty_epoch(scene: Scene, restart: Callable[[PublishedHolder], None]) -> None:
    holder = await publishing(scene, 1, 2)
    old = scene.row()
    holder.apply([stored(4)])
    restart(holder)
    holder.apply([stored(3)])

    await until(lambda: scene.has(3))
    assert old is not None
    assert not any(scene.redis.exists(KEYS.blocks(SCOPE, POD, old.epoch, tier)) for tier in Tier)
    assert scene.entry_kinds()["empty"] == 1


async def test_stop_removes_the_holder(scene: Scene) -> None:
    """Row, blocks and name, with a log entry."""
    holder = await publishing(scene, 1)
    holder.stop()

    await until(lambda: scene.tasks[0].done())
    assert set(scene.redis.keys()) == {KEYS.scopes.encode(), LOG.encode()}
    assert scene.redis.xrevrange(LOG, count=1)[0][1][b"k"] == b"gone"


async def test_lost_events_mark_the_holder_incomplete(scene: Scene) -> None:
    """At once, and complete again after a catch-up."""
    holder = await publishing(scene, 1, ttl_s=180.0, settings=SETTINGS.model_copy(update={"heartbeat_s": 60.0}))
    for complete in (False, True):
        holder.caught_up(complete=complete)
        await until(lambda: (row := scene.row()) and row.complete is complete)  # noqa: B023


# --- who publishes ---


async def test_the_newest_publisher_writes_until_it_stops(scene: Scene) -> None:
    """The other one stands by until the newest has not written for its TTL."""
    first = await publishing(scene, 1)
    await publishing(scene, 1, 2)
    await until(lambda: first.state is PublishState.STANDBY)
    first.apply([stored(3)])
    scene.tasks[1].cancel()
    await asyncio.wait([scene.tasks[1]])
    assert 0 < scene.redis.pttl(ROW) <= 1000 * LASTING_S
    scene.redis.pexpire(ROW, 1)  # as if that time had passed, for which a machine may also pause

    await until(lambda: scene.has(1, 3) and first.state is PublishState.PUBLISHING)


async def test_a_standby_publisher_does_not_remove_the_holder(scene: Scene) -> None:
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
    "a block slipped in": lambda scene: scene.redis.sadd(scene.blocks_key(), b"12345678"),
    "another tier slipped in": lambda scene: scene.redis.sadd(scene.blocks_key(Tier.DISK), b"12345678"),
    "the blocks evicted": lambda scene: scene.redis.delete(scene.blocks_key()),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
async def test_blocks_lost_by_redis_are_written_again(scene: Scene, lose: Callable[[Scene], None]) -> None:
    """In a new, sealed epoch, with the next heartbeat at the latest."""
    holder = await publishing(scene, 1, 2)
    lose(scene)

    await until(lambda: holder.reloads == 2 and not holder.pending_blocks and scene.has(1, 2))
    holder.apply([removed(2)])
    await until(lambda: scene.has(1))


OUTAGES: dict[str, tuple[Callable[[Scene], object], Callable[[Scene], object]]] = {
    "full": (lambda on: on.redis.config_set("maxmemory", 1), lambda on: on.redis.config_set("maxmemory", 0)),
    "a replica": (lambda on: on.redis.replicaof("localhost", 1), lambda on: on.redis.replicaof("NO", "ONE")),
    "hanging": (lambda on: on.server.pause(), lambda on: on.server.resume()),
}


@pytest.mark.parametrize("scene", [0.2], indirect=True)
@pytest.mark.parametrize("outage", OUTAGES)
async def test_writes_are_retried_until_redis_accepts_them(scene: Scene, outage: str) -> None:
    """A full server, one that became a replica, one that hangs."""
    disturb, mend = OUTAGES[outage]
    holder = await publishing(scene, 1, 2)
    disturb(scene)
    holder.apply([stored(3), removed(1)])
    await until(lambda: holder.state is PublishState.UNREACHABLE and holder.failures >= 2)
    holder.apply([stored(4), removed(3)])
    mend(scene)

    await until(lambda: scene.has(2, 4) and holder.state is PublishState.PUBLISHING)


@pytest.mark.parametrize("outage", ["full", "a replica"])
async def test_a_restart_during_a_long_outage_is_published(scene: Scene, outage: str) -> None:
    """Redis has lost the holder; only blocks stored after the restart are written."""
    disturb, mend = OUTAGES[outage]
    holder = await publishing(scene, 1, 2, ttl_s=SHORT_S)
    disturb(scene)
    await until(lambda: scene.row() is None and holder.failures)
    holder.restarted()
    holder.apply([stored(3)])
    mend(scene)

    await until(lambda: scene.has(3) and holder.state is PublishState.PUBLISHING)


@pytest.mark.parametrize("scene", [0.2], indirect=True)
async def test_a_lost_response_causes_no_reload(scene: Scene) -> None:
    """Even if a heartbeat is due when Redis answers again."""
    holder = await publishing(scene, 1)
    scene.server.pause()
    holder.apply([stored(2)])
    await until(lambda: holder.failures >= 2)
    scene.server.resume()

    await until(lambda: scene.has(1, 2) and holder.state is PublishState.PUBLISHING)
    assert holder.reloads == 1


# --- one write ---


async def test_a_repeated_write_is_idempotent(scene: Scene) -> None:
    """One log entry, the same row, the result OK."""
    writer = scene.writer()
    await writer.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await writer.apply([], complete=True)  # so that the server knows the script
    change = [BlockChange(Tier.GPU, True, sorted(hashes(1)))]
    (connected,) = scene.connection.client.connection_pool._available_connections
    scene.server.pause()
    connected.socket_timeout = 0.2
    with pytest.raises(RedisError):
        await writer.apply(change, complete=True)
    connected.socket_timeout = DEADLINE_S
    scene.server.resume()
    await until(lambda: scene.has(1))

    assert await writer.apply(change, complete=True) is WriteResult.OK
    assert (scene.has(1), scene.entry_kinds()) == (True, {"empty": 1, "change": 2})
    assert await writer.beat(complete=True) is WriteResult.OK


async def test_an_acknowledged_write_lost_in_a_failover_is_detected(scene: Scene) -> None:
    """The next write is refused and changes nothing."""
    writer = scene.writer()
    await writer.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await writer.apply([BlockChange(Tier.GPU, True, sorted(hashes(1)))], complete=True)
    scene.redis.hset(ROW, "seq", 0)

    assert await writer.apply([BlockChange(Tier.GPU, True, sorted(hashes(2)))], complete=True) is WriteResult.GAP
    assert scene.has(1)


async def test_an_old_epoch_is_fenced(scene: Scene) -> None:
    """Its writes change neither blocks nor TTL nor log."""
    old, new = scene.writer(), scene.writer()
    await old.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await new.begin(EntryKind.EMPTY, FACTS, take_over=True)
    await new.apply([BlockChange(Tier.GPU, True, sorted(hashes(1)))], complete=True)
    before = scene.entry_kinds()

    late = old.apply([BlockChange(Tier.GPU, True, sorted(hashes(2)))], complete=True)
    assert {await late, await old.beat(complete=False), await old.retire()} == {WriteResult.FENCED}
    assert await old.begin(EntryKind.RELOAD, FACTS, take_over=False) is WriteResult.HELD
    assert (scene.has(1), scene.entry_kinds()) == (True, before)
