"""Ids of stored responses reach a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import RedisError

from router.feeds.cluster_feeds import (
    MAX_WAITING_RESPONSES,
    RESPONSE_TTL_S,
    SharedResponses,
)
from router.index.stored_responses import StoredResponse
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from tests.redis_process import address_of
from tests.redis_servers.server import RedisServer, binaries

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[RedisConnection]:
    async with RedisServer(kind) as server:
        connection = RedisConnection(address_of(server.url), timeout_s=20)
        try:
            yield connection
        finally:
            await connection.close()


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
