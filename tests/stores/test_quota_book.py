"""The script in Redis divides limits as `ShareBook` does."""

from __future__ import annotations

import random

import pytest

from router.admission.meter import HourWindow
from router.admission.sharing import CeilingReport, Grant, Grants, MeterSharing
from router.feeds import shared_rows
from router.feeds.shared_rows import SharedQuotas
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.scripts import EXCHANGE_SHARES, NOW
from tests.admission.share_book import ShareBook

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("quotas")
NOW_MS = 10_000_000


def book_of(connection: RedisConnection, member: str) -> SharedQuotas:
    return SharedQuotas(connection, KEYS, member, MeterSharing())


def stop_the_books_clock(patch: pytest.MonkeyPatch) -> None:
    """What a process may use ends a second after its last exchange, and a machine may pause for longer."""
    still = EXCHANGE_SHARES.replace(NOW, f"local now_ms = {NOW_MS}")
    assert still != EXCHANGE_SHARES
    patch.setattr(shared_rows, "EXCHANGE_SHARES", still)


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_the_books_clock(monkeypatch)


@pytest.mark.usefixtures("still_clock")
async def test_it_grants_what_the_book_in_memory_grants(connection: RedisConnection) -> None:
    """For random reports of three processes on four limits, up to those of a trillion tokens."""
    book, draw = ShareBook(), random.Random(7)
    books = {name: book_of(connection, name) for name in ("a", "b", "c")}
    limits = {"a tenant\0m\0PROMPT": 10**12, "t\0\0REQUESTS": 10, "ü\0m\0OUTPUT": 5000, "t\0m\0CONCURRENT": 3}
    for _ in range(300):
        name = draw.choice(sorted(books))
        reports = [
            CeilingReport(
                meter, limit, draw.choice((0, draw.randrange(limit + 2))), draw.choice((0, draw.randrange(limit + 2)))
            )
            for meter, limit in draw.sample(sorted(limits.items()), draw.randrange(len(limits) + 1))
        ]
        assert await books[name].grants(reports) == book.exchange(name, reports, 0.0)


@pytest.mark.usefixtures("still_clock")
async def test_what_a_process_had_that_is_silent_is_free(connection: RedisConnection) -> None:
    """Also if Redis has kept its row over a restart."""
    gone, here = (book_of(connection, name) for name in ("gone", "here"))
    await gone.grants([CeilingReport("m", 10, 6, 4)])
    assert await here.grants([CeilingReport("m", 10, 1, 5)]) == Grants([Grant(1, 6, -1)], 2)
    long_ago_ms = "1000"
    await connection.client.hset(KEYS.quota("m"), "gone", f"6 10 {long_ago_ms}")
    await connection.client.hset(KEYS.quota_members, "gone", long_ago_ms)
    assert await here.grants([CeilingReport("m", 10, 1, 5)]) == Grants([Grant(6, 0, 4)], 1)
    assert await connection.client.hkeys(KEYS.quota("m")) == [b"here"]


@pytest.mark.usefixtures("still_clock")
async def test_a_process_holds_what_it_has_used_a_second_after_its_last_exchange(connection: RedisConnection) -> None:
    """What more it might have used is free. It still counts as a process for a while."""
    gone, here = (book_of(connection, name) for name in ("gone", "here"))
    await gone.grants([CeilingReport("m", 10, 6, 4)])
    await connection.client.hset(KEYS.quota_members, "gone", str(NOW_MS - 1100))
    assert await here.grants([CeilingReport("m", 10, 1, 5)]) == Grants([Grant(4, 6, 0)], 2)


@pytest.mark.usefixtures("still_clock")
async def test_money_of_a_process_that_is_gone_stays_spent_for_an_hour(connection: RedisConnection) -> None:
    """Else a router that restarts would have the whole budget again."""
    gone, here = (book_of(connection, name) for name in ("gone", "here"))
    money = CeilingReport("m", 10, 6, 4, HourWindow.kept_s)
    await gone.grants([money])
    own = CeilingReport("m", 10, 0, 9, HourWindow.kept_s)
    for silent_s, grant in ((3000, Grant(4, 6, 0)), (HourWindow.kept_s + 1, Grant(9, 0, 1))):
        at_ms = str(NOW_MS - 1000 * silent_s)
        await connection.client.hset(KEYS.quota("m"), "gone", f"6 10 {at_ms}")
        await connection.client.hset(KEYS.quota_members, "gone", at_ms)
        assert await here.grants([own]) == Grants([grant], 1)


async def test_a_row_that_cannot_be_read_counts_as_gone(connection: RedisConnection) -> None:
    await connection.client.hset(KEYS.quota("m"), "newer", "1 2 3 4")
    assert await book_of(connection, "a").grants([CeilingReport("m", 10, 0, 5)]) == Grants([Grant(5, 0, 5)], 1)


@pytest.mark.usefixtures("still_clock")
async def test_a_process_that_stops_is_no_member(connection: RedisConnection) -> None:
    one, other = (book_of(connection, name) for name in "ab")
    await one.grants([CeilingReport("m", 10, 6, 4)])
    assert (await other.grants([])).members == 2
    await one.leave()
    assert await other.grants([CeilingReport("m", 10, 0, 5)]) == Grants([Grant(4, 6, 0)], 1)


async def test_unused_keys_expire(connection: RedisConnection) -> None:
    await book_of(connection, "a").grants([CeilingReport("m", 10, 1, 0)])
    for key in (KEYS.quota("m"), KEYS.quota_members):
        assert 0 < await connection.client.pttl(key) <= 120_000
