"""A writer of the index can fill it with anything. A router reads a bounded part, says so once, and goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis
from structlog.testing import capture_logs

from router.index.cluster import EntryKind
from router.stores.index_reader import IndexReader
from router.stores.redis_schema import encode_generation, pack_blocks, scope_of
from router.types import Tier
from tests.feeds.test_kv_redis import GENERATION, KEYS, LOG, Scene, until
from tests.kit.deadlines import running
from tests.redis_process import redis_process

pytestmark = [pytest.mark.anyio, pytest.mark.net]


MIB = 1 << 20
SCOPE = scope_of(GENERATION)
READ_BYTES = 2 * MIB
"""More than a router reads of all that is honest in these tests."""


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """An honest publisher has written `a`; the test writes what it wants into the same Redis."""
    with redis_process() as server, redis.Redis.from_url(server.url) as client:
        scene = Scene(server, client)
        yield scene
        await scene.wire.close()
        await scene.connection.close()


def sent_bytes(scene: Scene) -> int:
    """What the server has sent to all its clients."""
    return int(scene.redis.info("stats")["total_net_output_bytes"])


async def test_large_log_entries_are_passed_over(scene: Scene) -> None:
    """They are not even sent, and the changes behind them arrive."""
    pod = await scene.publishing("a", [1])
    before = sent_bytes(scene)
    with capture_logs() as lines:
        async with running(scene.feed.run()):
            await scene.feed.loaded.wait()
            for size in (64 * MIB, 64 * MIB, MIB):
                scene.redis.xadd(LOG, {"k": "change", "h": "a", "e": pod.writer.epoch, "s": 2, "+0": b"x" * size})
            scene.redis.xadd(LOG, {b"%d" % number: b"" for number in range(100_000)})
            await pod.store([2])
            await until(lambda: scene.has("a", [1, 2]))
    assert sent_bytes(scene) - before < READ_BYTES
    assert [line for line in lines if line["event"] == "skipping what is too large"], lines
    assert len(lines) < 6, "each kind is logged once"


async def test_a_flood_of_generations_is_cut(scene: Scene) -> None:
    """Few revisions of a model are followed, those that were known first among them."""
    pod = await scene.publishing("a", [1])
    before, asked = sent_bytes(scene), set[str]()
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        forged = (replace(GENERATION, revision=f"{number}") for number in range(20_000))
        scene.redis.zadd(KEYS.scopes, {encode_generation(each): time.time() + 60 for each in forged})
        scene.redis.zadd(KEYS.scopes, {b"%d" % number + b"x" * 8 * MIB: time.time() + 60 for number in range(3)})
        read_s = time.monotonic()
        await until(lambda: scene.in_contact_since(read_s + 1))
        asked |= {log._generation.revision for log in scene.feed._logs.values()}
        assert scene.has("a", [1])
        await pod.store([2])
        await until(lambda: scene.has("a", [1, 2]))
    assert "" in asked and len(asked) <= 8
    assert sent_bytes(scene) - before < 2 * READ_BYTES


async def test_a_large_row_is_not_read(scene: Scene) -> None:
    """Nor are many names, or blocks that are none."""
    await scene.publishing("a", [1])
    for name, facts in (("b", "x" * 25 * MIB), ("c", "{}")):
        row = {"epoch": 1, "seq": 0, "complete": 1, "owner": "me", "beat": 1, "facts": facts}
        scene.redis.hset(KEYS.holder(SCOPE, name), mapping=row | {f"n{tier:d}": 0 for tier in Tier})
        scene.redis.zadd(KEYS.holders(SCOPE), {name: time.time() * 1000})
    scene.redis.hset(KEYS.holder(SCOPE, "c"), mapping={str(number): "x" * 100 for number in range(50_000)})
    scene.redis.sadd(KEYS.blocks(SCOPE, "c", 1, Tier.GPU), pack_blocks([7]), *(b"%d" % n * MIB for n in range(8)))
    scene.redis.zadd(KEYS.holders(SCOPE), {b"y" * 16 * MIB: 0} | {b"%d" % number: 0 for number in range(50_000)})
    before = sent_bytes(scene)
    with capture_logs() as lines:
        async with running(scene.feed.run()):
            await scene.feed.loaded.wait()
            assert scene.has("a", [1]) and scene.has("c", [7]) is False and scene.known("b") is None
            assert (known := scene.known("c")) and scene.index.masks.held(known.name) == 1
    assert sent_bytes(scene) - before < READ_BYTES
    skipped = {line["what"] for line in lines if line["event"] == "skipping what is too large"}
    assert skipped == {"holder row", "holders"}


@pytest.mark.parametrize("name", ["epoch", "seq", "beat", "n0"])
@pytest.mark.parametrize("number", ["-1", "9" * 18])
async def test_numbers_out_of_range_are_refused(scene: Scene, name: str, number: str) -> None:
    pod = await scene.publishing("a", [1])
    reader = IndexReader(scene.connection, KEYS)
    scene.redis.hset(KEYS.holder(SCOPE, "a"), name, number)
    assert await reader.row(GENERATION, "a") is None
    scene.redis.xadd(LOG, {"k": "beat", "h": "a", "e": number, "s": 1}, id="9999999999999-0")
    scene.redis.xadd(LOG, {"k": "beat", "h": "a", "e": pod.writer.epoch, "s": number})
    entries = await reader.entries(GENERATION, b"9999999999998-0")
    assert [entry for _, entry in entries] == [None, None]


async def test_holders_that_one_publisher_invents_are_limited(scene: Scene) -> None:
    """Each costs memory, and work at every change of the others."""
    pod = await scene.publishing("a", [1])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        with scene.redis.pipeline(transaction=False) as pipeline:
            for number in range(5000):
                pipeline.xadd(LOG, {"k": EntryKind.EMPTY.value, "h": f"{number}", "e": 1, "s": 0, "f": "{}"})
            pipeline.execute()
        await pod.store([2])
        await until(lambda: scene.has("a", [1, 2]))
        assert len(list(scene.index.holders)) <= 2048
