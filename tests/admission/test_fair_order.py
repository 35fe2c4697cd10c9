"""Bands first, then tenants by their weights in prefill milliseconds, then those that have to start first."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_higher_band_goes_first() -> None:
    """With any weights."""
    low, high = waiting(Tenant(name="a", weight=100.0)), waiting(Tenant(name="b", band=1))
    assert list(queued(low, high).in_order()) == [high, low]


def test_of_one_tenant_the_request_that_has_to_start_first_goes_first() -> None:
    """Requests with one deadline go in the order of arrival."""
    late, early, same = (waiting(LIGHT, start_by_s=at_s) for at_s in (2.0, 1.0, 1.0))
    assert list(queued(late, early, same).in_order()) == [early, same, late]


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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(0.1, 1e4), st.floats(0, 10)), max_size=60))
def test_every_request_is_served_once(requests: list[tuple[int, int, float, float]]) -> None:
    """None is lost, and none starves: what waits is served, if nothing more comes."""
    tenants = {(name, band): Tenant(name=str(name), band=band) for name in range(4) for band in range(3)}
    added = [waiting(tenants[name, band], ms, at_s) for name, band, ms, at_s in requests]
    order = queued(*added)
    assert {one.number for one in order.in_order()} == {one.number for one in added}
    assert sorted(one.number for one in serve_all(order)) == sorted(one.number for one in added)
    assert order.ahead_ms(HEAVY, 1.0) == 0.0


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=20), st.data())
def test_the_work_ahead_is_what_is_served_before(sizes: list[float], data: st.DataObject) -> None:
    """This holds within a tenant, as long as nothing else comes."""
    order = queued(*(waiting(LIGHT, ms, data.draw(st.floats(0, 2))) for ms in sizes))
    ahead_ms = order.ahead_ms(LIGHT, 1.0)
    mine = waiting(LIGHT, start_by_s=1.0)
    order.add(mine)
    served = serve_all(order)
    assert sum(one.prefill_ms for one in served[: served.index(mine)]) == pytest.approx(ahead_ms)


def test_the_work_ahead_counts_higher_bands_and_no_lower_ones() -> None:
    """All of it: they go first."""
    order = queued(waiting(Tenant(name="up", band=2), 300.0), waiting(Tenant(name="down", band=-1), 500.0))
    assert order.ahead_ms(LIGHT, 1.0) == 300.0


def test_of_tenants_that_got_the_same_the_request_that_came_first_goes_first() -> None:
    """Not the tenant whose name comes first."""
    first, second = waiting(Tenant(name="z")), waiting(Tenant(name="a"))
    assert list(queued(second, first).in_order()) == [first, second]


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


def test_the_most_urgent_request_has_to_start_first() -> None:
    """Neither tenants nor bands matter."""
    late, soon = waiting(HEAVY, start_by_s=3.0), waiting(Tenant(name="low", band=-1), start_by_s=2.0)
    assert queued(late, soon).most_urgent() is soon
    assert FairOrder().most_urgent() is None


def test_a_request_that_leaves_is_out_at_once() -> None:
    """It can leave only once."""
    gone, stays = waiting(LIGHT, 70.0), waiting(LIGHT, 30.0)
    order = queued(gone, stays)
    order.remove(gone)
    assert (list(order.in_order()), len(order), order.ahead_ms(LIGHT, 1.0)) == ([stays], 1, 30.0)
    with pytest.raises(KeyError):
        order.remove(gone)


def test_a_new_estimate_counts_for_the_work_ahead() -> None:
    """A prefix may have been cached, or evicted, since."""
    one = waiting(LIGHT, 500.0)
    order = queued(one)
    order.estimate(one, 20.0)
    assert order.ahead_ms(LIGHT, 1.0) == 20.0


def test_a_tenant_with_hot_prefixes_is_served_more_often() -> None:
    """Its requests need a tenth of the prefill, so it gets ten times as many."""
    order = queued(*(waiting(HEAVY, 100.0) for _ in range(30)), *(waiting(LIGHT, 10.0) for _ in range(30)))
    served = serve_all(order)[:11]
    assert Counter(one.tenant.name for one in served)["light"] == 10


def test_the_request_to_drop_is_the_last_of_the_largest_backlog_in_the_lowest_band() -> None:
    """So that a tenant that fills the queue harms itself."""
    high = [waiting(Tenant(name="vip", band=1), 1000.0) for _ in range(9)]
    small = [waiting(LIGHT, 300.0)]
    large = [waiting(HEAVY, 100.0, start_by_s=float(at)) for at in range(5)]
    assert queued(*high, *small, *large).last_of_largest() is large[-1]
    assert FairOrder().last_of_largest() is None


def test_tenants_without_requests_take_no_memory() -> None:
    """However many have come."""
    order = FairOrder()
    for at in range(1000):
        one = waiting(Tenant(name=str(at)))
        order.add(one)
        order.serve(one, 1.0)
    assert not order._bands
