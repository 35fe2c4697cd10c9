"""Ids of stored responses reach a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import pytest
from redis.exceptions import RedisError

from router.feeds.shared_rows import MAX_WAITING_RESPONSES, RESPONSE_TTL_S, SharedDrains, SharedResponses
from router.fleet.drains import Drain, Drains
from router.index.stored_responses import StoredResponse
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from tests.kit.deadlines import DEADLINE_S
from tests.redis_process import address_of
from tests.redis_servers.server import RedisServer, server_kinds

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[RedisConnection]:
    async with RedisServer(kind) as server:
        connection = RedisConnection(address_of(server.url, timeout_s=DEADLINE_S))
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize("kind", server_kinds())
async def test_another_router_finds_the_pod_of_a_response(kind: str) -> None:
    """A row that it cannot read, and an unknown id, are not found."""
    async with connected(kind) as connection:
        keys = Keys("warmroute")
        one, other = SharedResponses(connection, keys), SharedResponses(connection, keys)
        one.add(StoredResponse("r", "a", "m", 0.0))
        await one.exchange()
        found = await other.find("r")
        await connection.client.set(keys.response("bad"), b"x")
        assert found is not None and (found.id, found.pod, found.model) == ("r", "a", "m")
        assert await other.find("bad") is None and await other.find("r2") is None
        assert 0 < await connection.client.pttl(keys.response("r")) <= RESPONSE_TTL_S * 1000


async def test_responses_wait_while_redis_is_away() -> None:
    """At most a fixed number; none is found meanwhile."""
    exchange = SharedResponses(RedisConnection(address_of("redis://127.0.0.1:1/0", timeout_s=0.5)), Keys("warmroute"))
    for number in range(MAX_WAITING_RESPONSES + 1):
        exchange.add(StoredResponse(f"r{number}", "a", "m", 0.0))
    with pytest.raises(RedisError):
        await exchange.exchange()
    assert [each.id for each in exchange._waiting][:1] == ["r1"] and len(exchange._waiting) == MAX_WAITING_RESPONSES
    assert await exchange.find("r1") is None


# --- drains ---

DRAIN = Drain(1_764_590_400.0, "ada", "new, {odd}: power")


def shared(
    connection: RedisConnection, on_apply: Callable[[Drains], None] = lambda _: None
) -> tuple[Drains, SharedDrains]:
    """Those of a router."""
    drains = Drains()

    async def apply() -> None:
        on_apply(drains)

    return drains, SharedDrains(connection, Keys("warmroute"), drains, apply)


@pytest.mark.parametrize("kind", server_kinds())
async def test_drains_of_all_routers_are_one_set(kind: str) -> None:
    """Without an end; also of two that write at once."""
    async with connected(kind) as connection:
        (one, of_one), (other, of_other) = shared(connection), shared(connection)
        one.change("rack=r1", DRAIN)
        other.change("rack=r2", DRAIN)
        assert all(await asyncio.gather(of_one.share(), of_other.share()))
        await of_one.exchange()
        await of_other.exchange()
        assert one.current == other.current == {"rack=r1": DRAIN, "rack=r2": DRAIN}
        other.change("rack=r1", None)
        assert await of_other.share()
        await of_one.exchange()
        assert one.current == {"rack=r2": DRAIN} and await connection.client.pttl(Keys("warmroute").drains) == -1
        one.change("rack=r2", None)
        assert await of_one.share()
        await of_other.exchange()
        assert other.current == {}


async def test_a_redis_that_lost_the_drains_gets_them_from_a_router_that_knows_them() -> None:
    """A router without any, which comes first, does not end them."""
    async with connected("valkey") as connection:
        (one, of_one), (empty, of_empty) = shared(connection), shared(connection)
        one.change("rack=r1", DRAIN)
        assert await of_one.share()
        await connection.client.flushall()
        await of_empty.exchange()
        await of_one.exchange()
        await of_empty.exchange()
        assert one.current == empty.current == {"rack=r1": DRAIN}


UNREADABLE = {
    "text": b"nonsense",
    "list": b"[1]",
    "long": b"x" * 300_000,
    "field": b'{"rack=r9": {"by": 1}}',
    "time": b'{"rack=r9": {"at_s": 1e300, "by": "ada"}}',
    "words": b'{"rack=r9": {"at_s": 0, "by": "%b"}}' % (b"a" * 1000),
    "many": msgspec.json.encode({f"rack=r{number}": DRAIN for number in range(1000)}),
}


@pytest.mark.parametrize("found", UNREADABLE.values(), ids=UNREADABLE)
async def test_unreadable_drains_are_neither_used_nor_replaced(found: bytes) -> None:
    """Another version may have written them; the own ones stay."""
    async with connected("valkey") as connection:
        drains, sharing = shared(connection)
        await connection.client.set(Keys("warmroute").drains, found)
        drains.change("rack=r1", DRAIN)
        assert not await sharing.share()
        assert drains.current == {"rack=r1": DRAIN}
        assert await connection.client.get(Keys("warmroute").drains) == found


async def test_fields_of_a_later_version_are_kept() -> None:
    """Also when this version writes another drain; not those of a drain that it replaces."""
    async with connected("valkey") as connection:
        drains, sharing = shared(connection)
        later = b'{"rack=r1": {"at_s": 1764590400.0, "by": "ada", "why": "new, {odd}: power", "until_s": 5}}'
        await connection.client.set(Keys("warmroute").drains, later)
        await sharing.exchange()
        assert drains.current == {"rack=r1": DRAIN} and await connection.client.get(Keys("warmroute").drains) == later
        drains.change("rack=r2", DRAIN)
        assert await sharing.share()
        written = msgspec.json.decode(await connection.client.get(Keys("warmroute").drains))
        assert written["rack=r1"] == msgspec.json.decode(later)["rack=r1"] and set(written) == {"rack=r1", "rack=r2"}
        drains.change("rack=r1", Drain(0.0, "eve"))
        assert await sharing.share()
        written = msgspec.json.decode(await connection.client.get(Keys("warmroute").drains))
        assert "until_s" not in written["rack=r1"]


async def test_drains_of_another_router_are_applied_here() -> None:
    """Once, when they have changed."""
    applied: list[list[str]] = []
    async with connected("valkey") as connection:
        (one, of_one), (_, of_other) = shared(connection), shared(connection, lambda it: applied.append([*it.current]))
        one.change("rack=r1", DRAIN)
        assert await of_one.share()
        await of_other.exchange()
        await of_other.exchange()
    assert applied == [["rack=r1"]]


class LateRedis:
    """Holds one string. The first answer comes when `answer` is set."""

    def __init__(self) -> None:
        self.client, self.value, self.answer, self.asked = self, b"{}", asyncio.Event(), 0

    async def getrange(self, *_: object) -> bytes:
        self.asked, found = self.asked + 1, self.value
        if self.asked == 1:
            await self.answer.wait()
        return found

    async def script(self, _: str, __: object, values: tuple[bytes, bytes, int, int]) -> int:
        if self.value != values[0]:
            return 0
        self.value = values[1]
        return 1


async def test_a_late_answer_ends_no_drain_that_began_meanwhile() -> None:
    redis, changes = LateRedis(), list[list[str]]()
    drains, sharing = shared(cast(RedisConnection, redis), lambda drains: changes.append([*drains.current]))
    late = asyncio.create_task(sharing.exchange())
    await asyncio.sleep(0)
    drains.change("rack=r1", DRAIN)
    shares = asyncio.create_task(sharing.share())
    for _ in range(5):
        await asyncio.sleep(0)
    redis.answer.set()
    await late
    assert await shares and [*drains.current] == ["rack=r1"] and not changes


async def test_a_drain_that_redis_does_not_take_stays_here() -> None:
    drains, sharing = shared(RedisConnection(address_of("redis://127.0.0.1:1/0", timeout_s=0.5)))
    drains.change("rack=r1", DRAIN)
    assert not await sharing.share() and drains.current == {"rack=r1": DRAIN}
