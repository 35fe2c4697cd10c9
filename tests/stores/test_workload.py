"""The rows in which routers tell one another what they have in flight, in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from router.feeds.workload import WorkloadFeed
from router.fleet.ledger import Ledger
from router.stores.connection import Connection, parse_url
from router.stores.schema import Keys
from router.stores.workload import Workload
from router.types import InFlight, Pod, PodSpeed
from tests.redis_servers.server import RedisServer, binaries, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("workload")
POD = Pod(id="a", url="http://a:8000", engine="vllm", speed=PodSpeed(1.0, 0.02, 1e-6))
WORK = {"a": InFlight(2, 1, 300, 41.5, 900), "b": InFlight(1, 0, 0, 0.0, 10)}


@pytest.fixture(params=sorted(binaries()))
async def server(request: pytest.FixtureRequest) -> AsyncIterator[RedisServer]:
    """Each server that exists here."""
    async with RedisServer(str(request.param)) as running:
        yield running


@pytest.fixture
async def connection(server: RedisServer) -> AsyncIterator[Connection]:
    """To it."""
    made = Connection(parse_url(server.url), timeout_s=2)
    yield made
    await made.close()


def rows(connection: Connection, *routers: str, lifetime_s: float = 60) -> list[Workload]:
    """One for each router."""
    return [Workload(connection, KEYS, router, lifetime_s=lifetime_s) for router in routers]


def told(ledger: Ledger) -> dict[str, InFlight]:
    """Its own sums as other routers read them: how far the first prompt in line is stays here."""
    return {pod: structs.replace(work, head_ms=0.0, head_since_s=0.0) for pod, work in ledger.own().items()}


async def test_each_sees_the_others_and_not_itself(connection: Connection) -> None:
    """In one round trip both ways."""
    one, two, three = rows(connection, "1", "2", "3")
    assert await one.exchange(WORK) == {}
    assert await two.exchange({}) == {"1": WORK}
    assert await three.exchange({"c": InFlight(1, 1, 1, 1.0, 1)}) == {"1": WORK, "2": {}}
    assert await one.exchange({}) == {"2": {}, "3": {"c": InFlight(1, 1, 1, 1.0, 1)}}


async def test_what_is_by_our_own_clock_stays_here(connection: Connection) -> None:
    """Transfers count everywhere; since when a prompt is first in line means nothing to another machine."""
    one, two = rows(connection, "1", "2")
    await one.exchange({"a": InFlight(1, 1, 300, 41.5, 900, pulls=2, head_ms=41.5, head_since_s=77.0)})
    assert await two.exchange({}) == {"1": {"a": InFlight(1, 1, 300, 41.5, 900, pulls=2)}}


async def test_other_workers_of_the_same_router_are_left_out(connection: Connection) -> None:
    """They are known already; routers elsewhere see each of them."""
    one, two, elsewhere = (
        Workload(connection, KEYS, name, lifetime_s=60, siblings=siblings)
        for name, siblings in (("x:1", "x:"), ("x:2", "x:"), ("y:1", "y:"))
    )
    await one.exchange(WORK)
    assert await two.exchange(WORK) == {}
    assert await elsewhere.exchange({}) == {"x:1": WORK, "x:2": WORK}
    assert await one.exchange(WORK) == {"y:1": {}}


async def test_who_leaves_takes_its_row_along(connection: Connection) -> None:
    """At once, not after the row's lifetime."""
    one, two = rows(connection, "1", "2")
    await one.exchange(WORK)
    await one.leave()
    assert await two.exchange({}) == {}


async def test_a_dead_replicas_row_expires(connection: Connection) -> None:
    """Though others keep the hash itself alive; and is thrown away in the end."""
    (dead,), (alive,) = rows(connection, "1"), rows(connection, "2", lifetime_s=0.05)
    await dead.exchange(WORK)
    assert set(await alive.exchange({})) == {"1"}

    async def is_passed_over() -> bool:
        return await alive.exchange({}) == {}

    async def is_gone() -> bool:
        await alive.exchange({})
        return bool(await connection.client.hkeys(KEYS.routers) == [b"2"])

    await until(is_passed_over)
    await until(is_gone)


@pytest.mark.parametrize(
    "row", [b"", b"no time", b"\xff\xff", b"12345", b"99999999999999 \xc1", b"99999999999999 \x01"]
)
async def test_a_row_that_nobody_of_us_wrote_is_passed_over(connection: Connection, row: bytes) -> None:
    """And hides nobody else's."""
    one, two = rows(connection, "1", "2")
    await one.exchange(WORK)
    await connection.client.hset(KEYS.routers, "strange", row)
    assert await two.exchange({}) == {"1": WORK}


async def test_two_routers_share_their_load_and_keep_their_own_without_redis(server: RedisServer) -> None:
    """What one dispatches the other counts, until Redis is gone or it finishes."""
    connections = [Connection(parse_url(server.url), timeout_s=1) for _ in range(2)]
    ledgers = [Ledger(), Ledger()]
    feeds = [
        WorkloadFeed(Workload(connection, KEYS, name, lifetime_s=60), ledger)
        for connection, name, ledger in zip(connections, "12", ledgers, strict=True)
    ]
    tasks = [asyncio.create_task(feed.run()) for feed in feeds]
    try:
        lease = ledgers[0].book(POD, 1000, 600, 0.0)

        async def is_shared() -> bool:
            return ledgers[1].inflight() == told(ledgers[0]) and feeds[0].replicas == feeds[1].replicas == 1

        async def is_alone() -> bool:
            return not ledgers[1].inflight() and feeds[1].replicas == 0

        await until(is_shared)
        server.kill()
        await until(is_alone)
        assert ledgers[0].inflight() == ledgers[0].own() != {}
        await server.start()
        await until(is_shared)
        ledgers[0].release(lease, 0.0)

        async def is_idle() -> bool:
            return not ledgers[1].inflight()

        await until(is_idle)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in connections:
            await each.close()
