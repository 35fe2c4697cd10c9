"""Processes that share limits keep them together, even if messages are late or lost."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from random import Random
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.admission.quotas import Hold, Quota, Quotas, Short
from router.admission.sharing import TOLERANCE, CeilingReport, Grants, MeterSharing, local_ceiling
from router.admission.tenant import Tenant
from router.errors import QuotaExceeded
from router.phases import Phases
from router.request.context import RequestContext
from router.request.fleet_state import Clock
from router.request.inbound import Head
from router.request.quota_charges import QuotaCharges
from tests.admission.share_book import ShareBook
from tests.kit import scenes

MEMBERS = 3


class Member:
    """One process: its quotas and what is on its way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sharing = MeterSharing(MEMBERS)
        self.quotas = Quotas(self.sharing)
        self.sent: list[CeilingReport] | None = None
        self.answer: Grants | None = None


class SharedLimits(RuleBasedStateMachine):
    """Three processes that use one book. Exchanges take time; any rule may come in between."""

    @initialize(limit=st.integers(1, 400))
    def begin(self, limit: int) -> None:
        self.now_s, self.book = 1000.0, ShareBook()
        self.limits = (Quota(requests_per_minute=limit, concurrent_requests=limit),)
        self.members = [Member(name) for name in "abc"]
        self.admitted: list[float] = []
        self.open: list[tuple[Member, Hold]] = []
        for member in self.members:
            self.complete(member)  # else they begin with their local shares

    def complete(self, member: Member) -> None:
        member.sharing.granted(
            self.book.exchange(member.name, member.sharing.reports(self.now_s), self.now_s), self.now_s
        )

    @rule(which=st.integers(0, MEMBERS - 1), count=st.integers(1, 200))
    def request(self, which: int, count: int) -> None:
        member = self.members[which]
        for _ in range(count):
            found = member.quotas.begin("t", self.limits, "m", "", self.now_s)
            if isinstance(found, Short):
                break
            self.admitted.append(self.now_s)
            self.open.append((member, found))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        member, hold = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        member.quotas.end(hold, None, None, self.now_s)

    @rule(which=st.integers(0, MEMBERS - 1))
    def send(self, which: int) -> None:
        member = self.members[which]
        if member.sent is None and member.answer is None:
            member.sent = member.sharing.reports(self.now_s)

    @rule(which=st.integers(0, MEMBERS - 1))
    def arrive(self, which: int) -> None:
        member = self.members[which]
        if member.sent is not None:
            member.answer, member.sent = self.book.exchange(member.name, member.sent, self.now_s), None

    @rule(which=st.integers(0, MEMBERS - 1))
    def answer(self, which: int) -> None:
        member = self.members[which]
        if member.answer is not None:
            member.sharing.granted(member.answer, self.now_s)
            member.answer = None

    @rule(wait_s=st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0, 20.0, 61.0]))
    def wait(self, wait_s: float) -> None:
        """All members report in time, also those that have nothing to do."""
        until_s = self.now_s + wait_s
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 1, until_s)
            for member in self.members:
                if member.sent is None and member.answer is None:
                    self.complete(member)
                else:
                    self.arrive(self.members.index(member))
                    self.answer(self.members.index(member))

    @invariant()
    def the_limit_is_kept(self) -> None:
        if hasattr(self, "members"):
            limit = self.limits[0].requests_per_minute
            assert limit is not None
            most = limit * (1 + TOLERANCE)
            assert sum(at_s > self.now_s - 60 for at_s in self.admitted) <= most
            assert len(self.open) <= most


TestSharedLimits = SharedLimits.TestCase
TestSharedLimits.settings = settings(stateful_step_count=40)


def exchange(book: ShareBook, *members: Member, now_s: float = 0.0) -> None:
    for member in members:
        member.sharing.granted(book.exchange(member.name, member.sharing.reports(now_s), now_s), now_s)


def admitted(member: Member, limits: tuple[Quota, ...], count: int, now_s: float) -> int:
    """How many of `count` requests are admitted one after the other."""
    found = (member.quotas.begin("t", limits, "m", "", now_s) for _ in range(count))
    return sum(isinstance(one, Hold) for one in found)


def test_one_process_can_use_the_whole_limit() -> None:
    """Where the others use nothing."""
    book, limits = ShareBook(), (Quota(requests_per_minute=100),)
    busy, idle = Member("busy"), Member("idle")
    exchange(book, busy, idle)
    assert admitted(idle, limits, 1, 0) == 0
    exchange(book, idle)
    assert admitted(idle, limits, 1, 0) == 1
    count = 0
    for turn in range(400):
        now_s = 12 + turn / 20
        count += admitted(busy, limits, 5, now_s)
        exchange(book, busy, idle, now_s=now_s)
    assert 99 <= count <= 100 * (1 + TOLERANCE)


def test_a_request_waits_only_where_another_process_may_have_a_share() -> None:
    book, limits = ShareBook(), (Quota(requests_per_minute=10),)
    one, other = Member("one"), Member("other")
    exchange(book, one, other)
    first = one.quotas.begin("t", limits, "m", "", 0)
    assert isinstance(first, Short) and first.may_fit
    for turn in range(100):
        admitted(one, limits, 10, turn / 20)
        exchange(book, one, now_s=turn / 20)
    full = one.quotas.begin("t", limits, "m", "", 5)
    assert isinstance(full, Short) and not full.may_fit and full.retry_after_s == 56


def test_whether_a_quota_is_spent_is_asked_without_a_claim() -> None:
    """It is not, where another process may have something left; the request itself then claims a share."""
    book, limits = ShareBook(), (Quota(requests_per_minute=10),)
    one, other = Member("one"), Member("other")
    exchange(book, one, other)
    assert isinstance(one.quotas.receive("t", limits, 0), Hold)
    assert not one.sharing.reports(0)
    for turn in range(100):
        admitted(one, limits, 10, turn / 20)
        exchange(book, one, now_s=turn / 20)
    spent = one.quotas.receive("t", limits, 5)
    assert isinstance(spent, Short) and spent.retry_after_s == 56


def test_without_the_book_each_process_has_its_share() -> None:
    """Never all of the limit, never nothing."""
    book, limits = ShareBook(), (Quota(requests_per_minute=30),)
    members = [Member(name) for name in "abc"]
    exchange(book, *members, *members)
    for member in members:
        member.sharing.lost(0)
    assert [admitted(member, limits, 100, 0) for member in members] == [10, 10, 10]


def test_a_busy_process_keeps_what_it_had_when_the_book_is_lost() -> None:
    """Requests below the limit are not refused because Redis is away."""
    book, limits = ShareBook(), (Quota(requests_per_minute=600),)
    members = [Member(name) for name in "abc"]
    exchange(book, *members)
    refused, now_s = 0, 0.0
    for tick in range(240):
        now_s = tick / 2
        if tick == 120:
            members[0].sharing.lost(now_s)
        missing = 4 - admitted(members[0], limits, 4, now_s)
        refused += missing if tick else 0  # the first waits for a share
        if tick < 120:
            exchange(book, *members, now_s=now_s)
    assert not refused


def test_a_small_limit_is_not_closed_by_a_lost_book() -> None:
    limits = (Quota(requests_per_minute=1, uncached_prompt_tokens_per_minute=100),)
    member = Member("a")
    member.sharing.members = 50
    hold = member.quotas.begin("t", limits, "m", "", 0)
    assert isinstance(hold, Hold) and member.quotas.charge(hold, 100, 0, 0) is None
    assert admitted(member, limits, 1, 0) == 0


def test_an_empty_book_learns_what_was_used() -> None:
    """After Redis has lost everything: less than one share is wrong."""
    book, limits = ShareBook(), (Quota(requests_per_minute=90),)
    members = [Member(name) for name in "abc"]

    def flood(book: ShareBook, from_s: float, rounds: int) -> int:
        count = 0
        for turn in range(rounds):
            for member in members:
                count += admitted(member, limits, 3, from_s + turn / 20)
                exchange(book, member, now_s=from_s + turn / 20)
        return count

    exchange(book, *members)
    first = flood(book, 0, 100)
    assert 90 <= first <= 90 * (1 + TOLERANCE)
    for member in members:
        member.sharing.lost(10)
    again = flood(ShareBook(), 10, 100)
    assert first + again <= 90 * (1 + TOLERANCE)


def test_a_silent_process_loses_its_share() -> None:
    book = ShareBook()
    assert book.exchange("a", [CeilingReport("m", 10, 6, 4)], 0.0).grants[0].ceiling == 10
    assert book.exchange("b", [CeilingReport("m", 10, 0, 5)], 1.0).grants[0].ceiling == 0
    found = book.exchange("b", [CeilingReport("m", 10, 0, 5)], 1.1)
    assert (found.grants[0].ceiling, found.members) == (4, 2)  # what it has used is not free
    found = book.exchange("b", [CeilingReport("m", 10, 0, 5)], 3.1)
    assert (found.grants[0].ceiling, found.members) == (5, 1)


def test_a_local_share_is_what_was_granted_and_a_part_of_what_was_free() -> None:
    assert [local_ceiling(90, ceiling, 30, 3) for ceiling in (60, 0, 0)] == [70, 10, 10]
    assert local_ceiling(90, 100, 0, 3) == local_ceiling(90, 90, -5, 3) == 90


class Traffic:
    """Routers of one book, and four requests of a tenant that may have eight, in virtual time."""

    RUNNING, LIMITS = 4, (Quota(concurrent_requests=8),)

    def __init__(self, routers: int, seed: int) -> None:
        self._random = Random(seed)
        self.book = ShareBook()
        self.routers = [Member(str(number)) for number in range(routers)]
        for router in self.routers:
            router.sharing.members = 1
        self.can_reach_book = True
        self.refused = 0
        self._running: list[tuple[float, Member, Hold]] = []

    def run(self, from_s: float, to_s: float, favourite: Member | None = None) -> None:
        """Whenever a request ends, another one comes: to any router, or to `favourite`."""
        for tick in range(int(from_s * 20), int(to_s * 20)):
            now_s = tick / 20
            self.end(lambda end_s, _router, now_s=now_s: end_s <= now_s, now_s)  # type: ignore[misc]
            for router in self.routers:
                self._exchange(router, now_s)
            while len(self._running) < self.RUNNING:
                router = favourite or self._random.choice(self.routers)
                if not self._begin(router, now_s):
                    self.refused += 1
                    break

    def end(self, has_ended: Callable[[float, Member], bool], now_s: float) -> None:
        for end_s, router, hold in [one for one in self._running if has_ended(one[0], one[1])]:
            router.quotas.end(hold, None, None, now_s)
            self._running.remove((end_s, router, hold))

    def _exchange(self, router: Member, now_s: float) -> None:
        reports = router.sharing.reports(now_s)
        if self.can_reach_book:
            router.sharing.granted(self.book.exchange(router.name, reports, now_s), now_s)
        else:
            router.sharing.lost(now_s)

    def _begin(self, router: Member, now_s: float) -> bool:
        """As `QuotaCharges` does."""
        for _ in range(3):
            found = router.quotas.begin("t", self.LIMITS, "m", "", now_s)
            if isinstance(found, Hold):
                self._running.append((now_s + self._random.uniform(0.3, 2.0), router, found))
                return True
            if not found.may_fit:
                return False
            self._exchange(router, now_s)
        return False


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("routers", [2, 4, 8])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_small_limit_of_concurrent_requests_outlives_the_book(routers: int, seed: int, is_empty: bool) -> None:
    """While Redis is away and just after it has come back, with its content or without, no request is refused where
    half of what is allowed runs."""
    traffic = Traffic(routers, seed)
    traffic.run(0, 10, traffic.routers[0] if seed == 0 else None)
    traffic.refused, traffic.can_reach_book = 0, False
    traffic.run(10, 15, traffic.routers[0] if seed == 0 else None)
    if is_empty:
        traffic.book = ShareBook()
    traffic.can_reach_book = True
    traffic.run(15, 25, traffic.routers[0] if seed == 0 else None)
    assert traffic.refused == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_router_holds_no_share_for_long(seed: int) -> None:
    """A second after it, no more than what it used, and after three seconds nothing."""
    traffic = Traffic(2, seed)
    dead, other = traffic.routers
    traffic.run(0, 10, dead)
    traffic.end(lambda _end_s, _router: True, 10)
    traffic.routers.remove(dead)
    traffic.run(10, 11.1, other)
    traffic.refused = 0
    traffic.run(11.1, 20, other)
    assert traffic.refused == 0


def test_a_request_whose_share_others_take_waits_for_the_next_one() -> None:
    """Requests that come during an exchange are counted before those that wait for it. Nobody else uses the limit, so
    it is no reason to refuse."""
    book, router, now = ShareBook(), Member("router"), [0.0]
    context, waiting = beginning(book, router, now)
    for _ in range(10):
        exchange_with_others_first(book, router, waiting)
    waiting.send(None)
    exchange(book, router)
    with pytest.raises(StopIteration):
        waiting.send(None)
    assert context.hold is not None


def test_a_request_waits_for_a_slow_redis_for_a_second() -> None:
    book, router, now = ShareBook(), Member("router"), [0.0]
    _, waiting = beginning(book, router, now)
    for _ in range(3):
        exchange_with_others_first(book, router, waiting)
        now[0] += 0.4
    with pytest.raises(QuotaExceeded):
        waiting.send(None)


PLENTY = (Quota(requests_per_minute=10**9),)


class Exchanges:
    """Waits for exchanges with other processes until the coroutine is resumed."""

    @types.coroutine
    def quota_sync(self) -> Generator[None, None, None]:
        yield


def beginning(book: ShareBook, router: Member, now: list[float]) -> tuple[RequestContext, Coroutine[None, None, None]]:
    """A request that is being counted by a router without a share. `now`: the time in seconds."""
    exchange(book, router)
    charges = QuotaCharges(router.quotas, Clock(lambda: now[0], lambda: now[0]), has_others=True)
    request = scenes.request(body=b"{}")
    head = Head(id="r", method="POST", target=b"/", headers=[])
    context = RequestContext(request, head, Phases(0.0), tenant=Tenant(name="t", quotas=PLENTY))
    return context, charges.begin(context, cast(Any, Exchanges()))


def exchange_with_others_first(book: ShareBook, router: Member, waiting: Coroutine[None, None, None]) -> None:
    waiting.send(None)
    exchange(book, router)
    while isinstance(router.quotas.begin("t", PLENTY, "m", "", 0.0), Hold):
        pass
