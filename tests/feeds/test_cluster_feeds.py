"""Receipts reach a real Redis, or are dropped and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import RedisError

from router.feeds import cluster_feeds
from router.feeds.cluster_feeds import (
    MAX_LINE_BYTES,
    MAX_WAITING_LINES,
    MAX_WAITING_RESPONSES,
    RESPONSE_TTL_S,
    ReceiptStream,
    SharedResponses,
)
from router.index.stored_responses import StoredResponse
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from tests.redis_process import address_of
from tests.redis_servers.server import RedisServer, binaries, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEY = "warmroute:1:receipts"


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[RedisConnection]:
    async with RedisServer(kind) as server:
        connection = RedisConnection(address_of(server.url), timeout_s=2)
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize("kind", sorted(binaries()))
async def test_lines_arrive_in_order_and_old_lines_are_trimmed(kind: str) -> None:
    """The stream keeps about `maxlen` lines."""
    lost: list[int] = []
    async with connected(kind) as connection:
        stream = ReceiptStream(connection, KEY, 100, lost.append)
        for number in range(1200):
            stream.write(b"%d" % number)
        running = asyncio.create_task(stream.run())
        try:
            await until(lambda: _newest(connection, b"1199"))
            assert not lost  # a batch that is cancelled before its answers arrive counts as lost
        finally:
            running.cancel()
        found = [fields[b"line"] for _, fields in await connection.client.xrange(KEY)]
    assert found == [b"%d" % number for number in range(1200 - len(found), 1200)]
    assert 100 <= len(found) < 400


async def _newest(connection: RedisConnection, line: bytes) -> bool:
    entries = await connection.client.xrevrange(KEY, count=1)
    return bool(entries) and entries[0][1][b"line"] == line


def test_long_lines_are_dropped_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines with prompts have any length."""
    monkeypatch.setattr(cluster_feeds, "MAX_WAITING_BYTES", 10)
    lost: list[int] = []
    stream = ReceiptStream(RedisConnection(address_of("redis://127.0.0.1:1/0"), timeout_s=0.5), KEY, 100, lost.append)
    for line in (b"x" * 7, b"y" * 4, b"z" * 3):
        stream.write(line)
    assert list(stream._waiting) == [b"x" * 7, b"z" * 3] and lost == [1]


def test_a_line_with_a_long_prompt_is_dropped() -> None:
    """Redis would keep thousands of them."""
    lost: list[int] = []
    stream = ReceiptStream(RedisConnection(address_of("redis://127.0.0.1:1/0"), timeout_s=0.5), KEY, 100, lost.append)
    stream.write(b"x" * MAX_LINE_BYTES)
    stream.write(b"x" * (MAX_LINE_BYTES + 1))
    assert len(stream._waiting) == 1 and lost == [1]


async def test_lines_are_dropped_and_counted_while_redis_is_unavailable() -> None:
    """Both lines of a failed batch and lines above the limit."""
    lost: list[int] = []
    connection = RedisConnection(address_of("redis://127.0.0.1:1/0"), timeout_s=0.5)
    stream = ReceiptStream(connection, KEY, 100, lost.append)
    for _ in range(MAX_WAITING_LINES + 2):
        stream.write(b"x")
    assert lost == [1, 1]
    with pytest.raises((RedisError, OSError)):
        await stream.send()
    await connection.close()
    assert lost == [1, 1, 500]


@pytest.mark.parametrize("kind", sorted(binaries()))
async def test_another_router_finds_the_pod_of_a_response(kind: str) -> None:
    """A row that it cannot read, and an unknown id, are not found."""
    async with connected(kind) as connection:
        keys = Keys("warmroute")
        one, other = SharedResponses(connection, keys), SharedResponses(connection, keys)
        one.add(StoredResponse("r", "a", "m", 0.0))
        await one.send()
        found = await other.find("r")
        await connection.client.set(keys.response("bad"), b"x")
        assert found is not None and (found.id, found.pod, found.model) == ("r", "a", "m")
        assert await other.find("bad") is None and await other.find("r2") is None
        assert 0 < await connection.client.pttl(keys.response("r")) <= RESPONSE_TTL_S * 1000


async def test_responses_wait_while_redis_is_away() -> None:
    """At most a fixed number; none is found meanwhile."""
    exchange = SharedResponses(RedisConnection(address_of("redis://127.0.0.1:1/0"), timeout_s=0.5), Keys("warmroute"))
    for number in range(MAX_WAITING_RESPONSES + 1):
        exchange.add(StoredResponse(f"r{number}", "a", "m", 0.0))
    with pytest.raises(RedisError):
        await exchange.send()
    assert [each.id for each in exchange._waiting][:1] == ["r1"] and len(exchange._waiting) == MAX_WAITING_RESPONSES
    assert await exchange.find("r1") is None
