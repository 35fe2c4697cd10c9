"""Three processes and a real Redis: quotas are kept, and no request fails because Redis does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest

from router.admission.quotas import Hold, Quota, Quotas, Short
from router.admission.sharing import TOLERANCE, CeilingReport, Grant, Grants, MeterSharing
from router.feeds import shared_rows
from router.feeds.shared_rows import SharedQuotas
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from tests.kit.deadlines import DEADLINE_S
from tests.redis_process import address_of
from tests.redis_servers.server import RedisServer
from tests.stores.test_quota_book import stop_the_books_clock

pytestmark = [pytest.mark.anyio, pytest.mark.net]

LIMITS = (Quota(requests_per_minute=300),)


class Router:
    """The quotas of one router. All routers use one clock, which stands still unless a test moves it."""

    now_s = 1000.0

    def __init__(self, feed: SharedQuotas, sharing: MeterSharing) -> None:
        self.feed = feed
        self.sharing = sharing
        self.quotas = Quotas(sharing)

    async def request(self, limits: tuple[Quota, ...] = LIMITS) -> Hold | Short:
        found = self.quotas.begin("t", limits, "m", "", self.now_s)
        if isinstance(found, Short) and found.may_fit:
            await self.feed.next_exchange()
            found = self.quotas.begin("t", limits, "m", "", self.now_s)
        return found


class FakeBook(SharedQuotas):
    """Shares without a Redis."""

    def __init__(self, sharing: MeterSharing) -> None:
        nowhere = RedisConnection(address_of("redis://127.0.0.1:1/0", timeout_s=0.5))
        super().__init__(nowhere, Keys("t"), "a", sharing, lambda: Router.now_s)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router gives up an exchange, and the book a router, only when Redis is away: else one that a slow machine has
    stopped for a second would have its local share, which may be wrong by one share."""
    stop_the_books_clock(monkeypatch)
    for name in ("MAX_EXCHANGE_S", "MAX_WAIT_S"):
        monkeypatch.setattr(shared_rows, name, DEADLINE_S)


@asynccontextmanager
async def routers(url: str, count: int = 3) -> AsyncIterator[list[Router]]:
    """Routers that know of each other."""
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        found = []
        for number in range(count):
            connection = RedisConnection(address_of(url, timeout_s=DEADLINE_S))
            stack.push_async_callback(connection.close)
            sharing = MeterSharing()
            feed = SharedQuotas(connection, Keys("t"), f"router-{number}", sharing, lambda: Router.now_s)
            found.append(Router(feed, sharing))
            task = asyncio.create_task(feed.run())
            stack.push_async_callback(asyncio.wait, [task])
            stack.callback(task.cancel)
        await known(found, count)
        yield found


async def known(found: list[Router], count: int) -> None:
    """Wait until each router has had an exchange with all others."""

    def all_are() -> bool:
        Router.now_s += 0.02
        return all(not one.sharing.is_away and one.sharing.members == count for one in found)

    await become(all_are)


async def become(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def admitted(found: list[Router], requests: int) -> int:
    """How many of `requests` at each router are admitted, all at once."""
    answers = await asyncio.gather(*(one.request() for one in found for _ in range(requests)))
    return sum(isinstance(answer, Hold) for answer in answers)


@pytest.mark.usefixtures("patient")
async def test_three_routers_keep_a_quota_together() -> None:
    """A flood at all of them at once: at most 2 % more, and hardly less."""
    async with RedisServer() as server, routers(server.url) as found:
        count = 0
        for _ in range(30):
            count += await admitted(found, 20)
            await asyncio.sleep(0)
        assert 300 * 0.98 <= count <= 300 * (1 + TOLERANCE)


@pytest.mark.usefixtures("patient")
async def test_one_of_three_routers_can_serve_nearly_all() -> None:
    async with RedisServer() as server, routers(server.url) as found:
        count = 0
        for _ in range(100):
            count += await admitted(found[:1], 10)
        assert 300 * 0.98 <= count <= 300 * (1 + TOLERANCE)


@pytest.mark.usefixtures("patient")
async def test_no_request_is_refused_while_redis_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate below the quota, at all routers alike or at one."""
    monkeypatch.setattr(Router, "now_s", 1000.0)

    async def minute(found: Sequence[Router]) -> int:
        """Refused requests of a minute with 60 % of the quota. It takes a tenth of a second, in which shares are
        exchanged twice."""
        refused = 0
        for number in range(180):
            Router.now_s += 1 / 3
            refused += isinstance(await found[number % len(found)].request(), Short)
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        return refused

    async with RedisServer() as server, routers(server.url) as found:
        for loaded in (found, found[:1]):
            assert await minute(loaded) == 0
            server.kill()
            await become(lambda: all(one.sharing.is_away for one in found))
            assert await minute(loaded) == 0
            await server.start()
            await known(found, 3)
            assert await minute(loaded) == 0


@pytest.mark.usefixtures("patient")
async def test_a_flood_before_while_and_after_redis_is_away_gets_no_more() -> None:
    """Each router keeps what it had used. One request more at each: no quota is closed that a router has not used."""
    async with RedisServer() as server, routers(server.url) as found:
        before = await admitted(found, 300)
        server.kill()
        await become(lambda: all(one.sharing.is_away for one in found))
        away = await admitted(found, 300)
        await server.start()
        await known(found, 3)
        after = await admitted(found, 300)
        assert before + away + after <= 300 * (1 + 2 * TOLERANCE)


async def test_without_redis_routers_begin_with_their_local_shares() -> None:
    sharing = MeterSharing(processes=3)
    connection = RedisConnection(address_of("redis://127.0.0.1:1/0", timeout_s=0.5))
    router = Router(SharedQuotas(connection, Keys("t"), "a", sharing), sharing)
    async with asyncio.timeout(DEADLINE_S):
        assert await admitted([router], 200) == 100
    await connection.close()


async def test_a_request_does_not_wait_long_for_a_redis_that_hangs() -> None:
    """It gets a part of the local share."""

    class Hanging(FakeBook):
        async def grants(self, reports: Sequence[CeilingReport]) -> Grants:
            await asyncio.Event().wait()
            raise AssertionError

    sharing = MeterSharing(processes=3)
    sharing.granted(Grants([], 3), 0.0)
    feed = Hanging(sharing)
    running = asyncio.create_task(feed.run())
    async with asyncio.timeout(DEADLINE_S):
        assert isinstance(await Router(feed, sharing).request(), Hold)
        assert sharing.is_away
        running.cancel()
        await asyncio.wait([running])
    assert shared_rows.MAX_WAIT_S <= 0.5


async def test_waiting_requests_share_exchanges() -> None:
    """Near a limit, where every request waits, Redis is asked at most 200 times a second."""
    asked_s: list[float] = []

    class Granting(FakeBook):
        async def grants(self, reports: Sequence[CeilingReport]) -> Grants:
            asked_s.append(asyncio.get_running_loop().time())
            return Grants([Grant(one.used, 0, 0) for one in reports], 3)

    sharing = MeterSharing(processes=3)
    feed = Granting(sharing)
    running = asyncio.create_task(feed.run())
    async with asyncio.timeout(DEADLINE_S):
        await become(lambda: not sharing.is_away)
        router = Router(feed, sharing)
        for _ in range(10):
            await asyncio.gather(*(router.request() for _ in range(50)))
        running.cancel()
        await asyncio.wait([running])
    assert len(asked_s) > 10
    assert all(later - earlier >= shared_rows.SHORTEST_INTERVAL_S * 0.9 for earlier, later in pairwise(asked_s))
