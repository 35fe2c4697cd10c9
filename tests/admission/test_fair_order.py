"""Bands first, then tenants by their weights in prefill milliseconds, then those that have to start first."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.admission.fair_order import FairOrder, Waiting
from router.admission.tenant import Tenant

NUMBERS = count()
HEAVY, LIGHT = Tenant(name="heavy"), Tenant(name="light")


def waiting(tenant: Tenant, prefill_ms: float = 100.0, start_by_s: float = 1.0) -> Waiting:
    return Waiting(tenant, body_bytes=10, number=next(NUMBERS), start_by_s=start_by_s, prefill_ms=prefill_ms)


def queued(*requests: Waiting) -> FairOrder:
    order = FairOrder()
    for one in requests:
        order.add(one)
    return order


def serve_all(order: FairOrder) -> list[Waiting]:
    """All requests, in the order of their service."""
    served = []
    while len(order):
        one = next(order.in_order())
        order.serve(one, one.prefill_ms)
        served.append(one)
    return served


def test_a_tenant_with_one_request_does_not_wait_behind_the_backlog_of_another() -> None:
    """It goes next, not last."""
    backlog = [waiting(HEAVY) for _ in range(20)]
    order = queued(*backlog)
    for one in backlog[:5]:
        order.serve(one, 100.0)
    mine = waiting(LIGHT)
    order.add(mine)
    assert mine in list(order.in_order())[:2]
    assert order.ahead_ms(LIGHT, 1.0) < order.ahead_ms(HEAVY, 1.0)


def test_a_tenant_gets_nothing_for_the_time_without_requests() -> None:
    """After a pause it shares the time from then on."""
    order = queued(*(waiting(HEAVY) for _ in range(50)), *(waiting(LIGHT) for _ in range(5)))
    for _ in range(30):
        one = next(order.in_order())
        order.serve(one, 100.0)
    for _ in range(20):
        order.add(waiting(LIGHT))
    served = Counter(one.tenant.name for one in serve_all(order)[:10])
    assert 3 <= served["heavy"] <= 7


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    sizes=st.lists(st.floats(1.0, 500.0), min_size=5, max_size=20),
)
def test_shares_follow_the_weights_while_all_are_backlogged(weights: list[float], sizes: list[float]) -> None:
    """In prefill milliseconds, to within the largest request."""
    tenants = [Tenant(name=str(at), weight=weight) for at, weight in enumerate(weights)]
    order = queued(*(waiting(tenant, ms) for tenant in tenants for ms in sizes * 10))
    got_ms: Counter[str] = Counter()
    while all(any(one.tenant == tenant for one in order.in_order()) for tenant in tenants):
        one = next(order.in_order())
        order.serve(one, one.prefill_ms)
        got_ms[one.tenant.name] += int(one.prefill_ms)
    normalized = [got_ms[tenant.name] / tenant.weight for tenant in tenants]
    slack_ms = 2 * (max(sizes) + len(sizes) * 10) / min(weights)
    assert max(normalized) - min(normalized) <= slack_ms


@given(st.lists(st.integers(1, 4), max_size=12))
def test_the_work_ahead_counts_the_requests_of_other_tenants_that_go_first(backlogs: list[int]) -> None:
    """A tenant that got no more than the new one has at least one of them, however little is due to it."""
    tenants = [Tenant(name=str(at)) for at in range(len(backlogs))]
    order = queued(*(waiting(one, 100.0) for one, size in zip(tenants, backlogs, strict=True) for _ in range(size)))
    ahead_ms = order.ahead_ms(LIGHT, 1.0)
    mine = waiting(LIGHT)
    order.add(mine)
    served = serve_all(order)
    assert sum(one.prefill_ms for one in served[: served.index(mine)]) == pytest.approx(ahead_ms)


def test_a_tenant_with_hot_prefixes_is_served_more_often() -> None:
    """Its requests need a tenth of the prefill, so it gets ten times as many."""
    order = queued(*(waiting(HEAVY, 100.0) for _ in range(30)), *(waiting(LIGHT, 10.0) for _ in range(30)))
    served = serve_all(order)[:11]
    assert Counter(one.tenant.name for one in served)["light"] == 10


def test_tenants_without_requests_take_no_memory() -> None:
    """However many have come."""
    order = FairOrder()
    for at in range(1000):
        one = waiting(Tenant(name=str(at)))
        order.add(one)
        order.serve(one, 1.0)
    assert not order._bands


def test_tenants_that_leave_take_no_memory_while_another_waits() -> None:
    order = queued(waiting(HEAVY))
    for at in range(1000):
        one = waiting(Tenant(name=str(at)))
        order.add(one)
        order.remove(one)
    assert [len(band.tenants) for band in order._bands.values()] == [1]


# --- any history ---

BANDS = {"low": -1, "heavy": 0, "light": 0, "double": 0, "vip": 1, "vips": 1}
TENANTS = [Tenant(name=name, band=band, weight=2.0 if name == "double" else 1.0) for name, band in BANDS.items()]
PREFILLS = st.sampled_from([10.0, 100.0, 100.0, 300.0])


class AnyOrder(RuleBasedStateMachine):
    """Requests come, are sent in turn, leave and are estimated anew, in any order; the order is found by a search
    through all requests. `got_ms`: the prefill that a tenant got for its weight, from its band's level on."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.waiting = FairOrder(), list[Waiting]()
        self.got_ms: dict[str, float] = {}
        self.levels_ms: dict[int, float] = defaultdict(float)

    def of(self, tenant: Tenant) -> list[Waiting]:
        return sorted((one for one in self.waiting if one.tenant == tenant), key=lambda one: one.order)

    def in_turn(self) -> list[Waiting]:
        """Those of the highest band first; of its tenants, one of those that got least, and came first."""
        turns, got_ms = list[Waiting](), dict(self.got_ms)
        rows = {tenant.name: self.of(tenant) for tenant in TENANTS}
        while heads := [row[0] for row in rows.values() if row]:
            top = max(one.tenant.band for one in heads)
            one = min(
                (one for one in heads if one.tenant.band == top), key=lambda one: (got_ms[one.tenant.name], one.number)
            )
            got_ms[one.tenant.name] += one.prefill_ms / one.tenant.weight
            turns.append(rows[one.tenant.name].pop(0))
        return turns

    def gone(self, one: Waiting) -> None:
        """A band in which nobody waits begins anew. A tenant without requests is remembered for what it owes alone."""
        self.waiting.remove(one)
        band = one.tenant.band
        begins_anew = not any(other.tenant.band == band for other in self.waiting)
        if begins_anew:
            self.levels_ms[band] = 0.0
        for tenant in TENANTS:
            owes_ms = self.got_ms.get(tenant.name, 0.0) - self.levels_ms[band]
            if tenant.band == band and not self.of(tenant) and (begins_anew or owes_ms <= 0):
                self.got_ms.pop(tenant.name, None)

    @rule(tenant=st.sampled_from(TENANTS), prefill_ms=PREFILLS, start_by_s=st.sampled_from([1.0, 2.0, 3.0]))
    def a_request_comes(self, tenant: Tenant, prefill_ms: float, start_by_s: float) -> None:
        if not self.of(tenant):
            self.got_ms[tenant.name] = max(self.got_ms.get(tenant.name, 0.0), self.levels_ms[tenant.band])
        one = waiting(tenant, prefill_ms, start_by_s)
        self.order.add(one)
        self.waiting.append(one)

    @precondition(lambda self: self.waiting)
    @rule(at=st.integers(0, 2), needs_ms=PREFILLS)
    def one_of_the_next_is_sent(self, at: int, needs_ms: float) -> None:
        turns = self.in_turn()
        one = turns[at % len(turns)]
        self.order.serve(one, needs_ms)
        band, name = one.tenant.band, one.tenant.name
        self.levels_ms[band] = max(self.levels_ms[band], self.got_ms[name])
        self.got_ms[name] += needs_ms / one.tenant.weight
        self.gone(one)

    @precondition(lambda self: self.waiting)
    @rule(at=st.integers(0, 99))
    def a_client_leaves(self, at: int) -> None:
        one = self.waiting[at % len(self.waiting)]
        self.order.remove(one)
        self.gone(one)
        assert not one.is_queued
        if self.waiting:
            with pytest.raises(KeyError):
                self.order.remove(one)

    @precondition(lambda self: self.waiting)
    @rule(at=st.integers(0, 99), prefill_ms=PREFILLS)
    def a_prefix_is_cached_or_evicted(self, at: int, prefill_ms: float) -> None:
        self.order.estimate(self.waiting[at % len(self.waiting)], prefill_ms)

    @invariant()
    def it_is_the_order_of_the_search(self) -> None:
        assert list(self.order.in_order()) == self.in_turn()
        assert len(self.order) == len(self.waiting) and all(one.is_queued for one in self.waiting)
        assert self.order.most_urgent() is min(self.waiting, key=lambda one: one.order, default=None)
        for tenant in TENANTS:
            others = [one for one in self.waiting if one.tenant != tenant]
            higher = [one for one in others if one.tenant.band > tenant.band]
            assert self.order.others_wait(tenant) == bool(others)
            assert self.order.may_overtake(tenant) == (not self.of(tenant) and not higher)
            if not any(one.tenant.band == tenant.band for one in others):
                ahead_ms = sum(
                    one.prefill_ms for one in [*higher, *(one for one in self.of(tenant) if one.start_by_s <= 2.0)]
                )
                assert self.order.ahead_ms(tenant, 2.0) == pytest.approx(ahead_ms)
                assert self.order.ahead_ms(tenant, 2.0, own=False) == pytest.approx(
                    sum(one.prefill_ms for one in higher)
                )

    @invariant()
    def the_largest_backlog_of_the_lowest_band_loses_its_last_request(self) -> None:
        if not self.waiting:
            assert self.order.last_of_largest() is None
            return
        lowest = min(one.tenant.band for one in self.waiting)
        backlogs = {tenant.name: self.of(tenant) for tenant in TENANTS if tenant.band == lowest}
        sizes_ms = {name: sum(one.prefill_ms / one.tenant.weight for one in row) for name, row in backlogs.items()}
        last = self.order.last_of_largest()
        assert last is not None and last is backlogs[last.tenant.name][-1]
        assert sizes_ms[last.tenant.name] == pytest.approx(max(sizes_ms.values()))


TestAnyOrder = AnyOrder.TestCase
