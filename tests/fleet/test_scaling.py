"""How many replicas a pool needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.fleet.scaling import (
    RATE_WINDOW_S,
    Arrivals,
    PoolKey,
    PoolSignals,
    Resource,
    Scaling,
    ScalingView,
    pool_of,
    signals_by_pool,
)
from router.types import InFlight, PodLoad, PodSpeed, PodState, PodStatus, Role
from tests.kit.scenes import make_pod

NOW_S = 1000.0
TARGETS = Scaling()
MAX_LOAD_AGE_S = 12.0
OLDEST_S = NOW_S - MAX_LOAD_AGE_S
pod = partial(make_pod, speed=PodSpeed(1.0, 0.02, 1e-6, 10.0, 0.1, 1e-4), models=("m",))
KEY = PoolKey("", "m", "both")

works = st.builds(
    InFlight,
    requests=st.integers(0, 500),
    prefill_requests=st.just(0),
    prefill_tokens=st.integers(0, 10**6),
    prefill_ms=st.floats(0, 1e6),
    decode_tokens=st.integers(0, 10**6),
)
loads = st.builds(
    PodLoad,
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    kv_usage=st.floats(0, 1),
    scraped_at_s=st.floats(NOW_S - 2 * MAX_LOAD_AGE_S, NOW_S),
)
fleets = st.lists(st.tuples(works, loads), min_size=1, max_size=8)


def status(name: str, load: PodLoad | None = None, **facts: Any) -> PodStatus:
    """A ready pod; by default with an idle, recent load."""
    return PodStatus(pod(name, **facts), PodState.READY, load or PodLoad(scraped_at_s=NOW_S))


def one_pool(
    statuses: Sequence[PodStatus],
    own: Mapping[str, InFlight] | None = None,
    rate: float = 0.0,
    targets: Scaling = TARGETS,
) -> PoolSignals:
    [found] = signals_by_pool(
        statuses, own or {}, {pool_of(statuses[0].pod): rate}, targets, NOW_S - MAX_LOAD_AGE_S, NOW_S
    )
    return found


def of(fleet: list[tuple[InFlight, PodLoad]]) -> tuple[list[PodStatus], dict[str, InFlight]]:
    return [status(str(n), load) for n, (_, load) in enumerate(fleet)], {
        str(n): own for n, (own, _) in enumerate(fleet)
    }


def need(signals: PoolSignals) -> float:
    return max(signals.desired_replicas.values())


# --- prefill ---


def test_prefill_needs_replicas_for_what_arrives_at_the_targeted_utilization() -> None:
    """Three seconds of prefill a second keep five replicas busy for 60 % of their time."""
    assert one_pool([status("a")], rate=3.0).desired_replicas[Resource.PREFILL] == pytest.approx(5.0)


def test_a_backlog_needs_replicas_that_work_it_off_in_time() -> None:
    """240 s of prefill, in 120 s, at 60 %."""
    signals = one_pool([status("a")], {"a": InFlight(8, 8, 9000, 240_000.0)})
    assert (signals.queued_tokens, signals.backlog_s) == (9000, 240.0)
    assert signals.desired_replicas[Resource.PREFILL] == pytest.approx(240 / 120 / 0.6)


def test_the_part_of_the_head_that_is_computed_is_not_in_the_backlog() -> None:
    work = InFlight(1, 1, 9000, 5000.0, head_ms=5000.0, head_since_s=NOW_S - 3)
    assert one_pool([status("a")], {"a": work}).backlog_s == pytest.approx(2.0)


# --- KV cache ---


def test_waiting_requests_need_as_much_kv_as_running_ones() -> None:
    """Ten run and fill 90 % of a cache; 30 are in flight: 2.7 caches, of which 80 % should be used."""
    loads = [PodLoad(running=6, waiting=20, kv_usage=0.6, scraped_at_s=NOW_S), PodLoad(4, 0, 0.3, NOW_S)]
    statuses = [status(str(n), load) for n, load in enumerate(loads)]
    signals = one_pool(statuses, {"0": InFlight(requests=26), "1": InFlight(requests=4)})
    assert signals.desired_replicas[Resource.KV_CACHE] == pytest.approx(2.7 / 0.8)
    assert signals.running == 10


def test_free_kv_is_in_tokens_of_ready_pods() -> None:
    """A pod whose load is not known counts like the others; without a capacity there is no number."""
    known = status("a", PodLoad(1, 0, 0.25, NOW_S), capacity_tokens=1000)
    unknown = status("b", PodLoad(), capacity_tokens=1000)
    assert one_pool([known, unknown]).kv_free_tokens == pytest.approx(1500)
    assert one_pool([status("a", PodLoad(1, 0, 0.25, NOW_S))]).kv_free_tokens is None


# --- decode steps ---


def test_decode_needs_replicas_that_keep_steps_within_the_target() -> None:
    """A step of 800 requests with 400,000 tokens takes 10 + 80 + 40 ms on one pod; with three pods 10 + 120 / 3 ms."""
    work = InFlight(requests=900, prefill_requests=100, decode_tokens=400_000)
    assert one_pool([status("a")], {"a": work}).desired_replicas[Resource.DECODE_STEPS] == pytest.approx(3.0)


def test_a_step_time_that_no_number_of_replicas_reaches_adds_none() -> None:
    unreachable = Scaling(itl_ms=10.0)
    signals = one_pool([status("a")], {"a": InFlight(requests=800)}, targets=unreachable)
    assert signals.desired_replicas[Resource.DECODE_STEPS] == 0


# --- what is not known ---


@pytest.mark.parametrize(
    "load", [PodLoad(), PodLoad(3, 1, 0.5, NOW_S - MAX_LOAD_AGE_S - 0.1)], ids=["never scraped", "too old"]
)
def test_a_pool_whose_loads_are_unknown_has_no_number(load: PodLoad) -> None:
    signals = one_pool([status("a", load, capacity_tokens=1000)], {"a": InFlight(requests=3)}, rate=1.0)
    assert signals.desired_replicas == {}
    assert (signals.running, signals.kv_free_tokens, signals.saturation) == (None, None, None)
    assert signals.ready_replicas == 1


def test_a_load_is_unknown_until_the_first_scrape_also_after_a_reboot() -> None:
    """The clock then starts near 0."""
    [signals] = signals_by_pool([status("a", PodLoad())], {}, {}, TARGETS, 3.0 - MAX_LOAD_AGE_S, 3.0)
    assert signals.desired_replicas == {}


def test_a_pool_without_a_ready_pod_has_no_number() -> None:
    """Pods that are ejected, or all gone but one that drains, say nothing about the need."""
    draining = replace(status("a", PodLoad(3, 0, 0.5, NOW_S)), state=PodState.DRAINING)
    assert one_pool([draining], {"a": InFlight(requests=3)}).desired_replicas == {}


def test_one_pod_without_a_load_does_not_hide_its_pool() -> None:
    """Its requests need what the others' need."""
    known, unknown = status("a", PodLoad(2, 0, 0.4, NOW_S)), status("b", PodLoad())
    signals = one_pool([known, unknown], {"a": InFlight(requests=2), "b": InFlight(requests=2)})
    assert signals.desired_replicas[Resource.KV_CACHE] == pytest.approx(0.8 / 0.8)
    assert signals.running == 4


def test_pods_that_have_not_reported_their_model_are_in_no_pool() -> None:
    assert not signals_by_pool([status("a", models=())], {}, {}, TARGETS, OLDEST_S, NOW_S)


@pytest.mark.parametrize("load", [PodLoad(-5, 0, -1.0, NOW_S), PodLoad(10**400, 0, 1e300, NOW_S)])
def test_impossible_loads_are_limited(load: PodLoad) -> None:
    """Engines may report anything that is a number."""
    signals = one_pool([status("a", load, capacity_tokens=1000)], {"a": InFlight(requests=10)})
    assert 0 <= need(signals) <= 10 / 0.8
    assert 0 <= (signals.kv_free_tokens or 0) <= 1000


# --- pools and replicas ---


def test_pods_of_one_deployment_model_and_role_are_a_pool() -> None:
    statuses = [
        status("a", pool="fast"),
        status("b", pool="fast"),
        status("c", pool="slow"),
        status("d", pool="fast", models=("n", "m")),
        status("e", pool="fast", role=Role.PREFILL),
    ]
    found = {one.key: one.ready_replicas for one in signals_by_pool(statuses, {}, {}, TARGETS, OLDEST_S, NOW_S)}
    assert found == {
        ("fast", "m", "both"): 2,
        ("slow", "m", "both"): 1,
        ("fast", "n", "both"): 1,
        ("fast", "m", "prefill"): 1,
    }


def test_ranks_of_one_engine_are_one_replica() -> None:
    """Work for eight ranks is work for two engines of four."""
    ranks = [status(f"{url}#{rank}", url=url, dp_rank=rank) for url in ("http://a", "http://b") for rank in range(4)]
    signals = one_pool(ranks, rate=8 * 0.6)
    assert signals.ready_replicas == 2
    assert signals.desired_replicas[Resource.PREFILL] == pytest.approx(2.0)
    assert signals.saturation == pytest.approx(1.0)


def test_engines_of_one_kubernetes_pod_are_one_replica() -> None:
    engines = [status(f"a:{port}", url=f"http://a:{port}", uid="same") for port in (8000, 8001)]
    assert one_pool(engines, rate=2 * 0.6).desired_replicas[Resource.PREFILL] == pytest.approx(1.0)


def test_saturation_is_the_needed_share_of_the_ready_replicas() -> None:
    two = [status("a"), status("b")]
    assert one_pool(two, rate=0.6).saturation == pytest.approx(0.5)
    assert one_pool(two, rate=6.0).saturation == 1.0


# --- properties ---


@given(fleets, st.floats(0, 50), st.integers(0, 7), works, st.floats(0, 50))
def test_more_work_never_needs_fewer_replicas(
    fleet: list[tuple[InFlight, PodLoad]], rate: float, at: int, more: InFlight, faster: float
) -> None:
    """More backlog, more requests, more context, more arrivals: by each resource."""
    statuses, own = of(fleet)
    name = str(at % len(fleet))
    both = InFlight(*(a + b for a, b in zip(as_row(own[name]), as_row(more), strict=True)))
    before = one_pool(statuses, own, rate).desired_replicas
    after = one_pool(statuses, {**own, name: both}, rate + faster).desired_replicas
    assert before.keys() == after.keys()
    assert all(after[resource] >= before[resource] for resource in before)


def as_row(work: InFlight) -> list[Any]:
    return [getattr(work, field) for field in InFlight.__struct_fields__]


@given(fleets, st.floats(0, 50), st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_the_needs_of_several_routers_add_up(
    fleet: list[tuple[InFlight, PodLoad]], rate: float, shares: list[float]
) -> None:
    """Two routers need together what one router with all requests needs."""
    statuses, own = of(fleet)
    parts: list[dict[str, InFlight]] = [{}, {}]
    for (name, work), share in zip(own.items(), shares, strict=False):
        mine = InFlight(*(type(value)(value * share) for value in as_row(work)))
        parts[0][name] = mine
        parts[1][name] = InFlight(*(a - b for a, b in zip(as_row(work), as_row(mine), strict=True)))
    whole = one_pool(statuses, own, rate).desired_replicas
    first, second = (one_pool(statuses, part, rate / 2).desired_replicas for part in parts)
    assert whole == pytest.approx({resource: first[resource] + second[resource] for resource in whole})


@given(fleets, st.floats(0, 50), st.integers(1, 20))
def test_idle_replicas_do_not_change_the_need(fleet: list[tuple[InFlight, PodLoad]], rate: float, idle: int) -> None:
    """A scaled pool needs what it needed before: an autoscaler that follows cannot oscillate."""
    statuses, own = of([*fleet, (InFlight(), PodLoad(1, 0, 0.1, NOW_S))])
    more = [*statuses, *(status(f"idle-{n}") for n in range(idle))]
    assert one_pool(more, own, rate).desired_replicas == pytest.approx(one_pool(statuses, own, rate).desired_replicas)


@given(fleets)
def test_an_idle_pool_needs_nothing_and_saturation_is_a_share(fleet: list[tuple[InFlight, PodLoad]]) -> None:
    """The autoscaler's minimum is then what stays."""
    statuses, own = of(fleet)
    assert set(one_pool(statuses).desired_replicas.values()) <= {0.0}
    saturation = one_pool(statuses, own).saturation
    assert saturation is None or 0 <= saturation <= 1


# --- arrivals ---


def arrived(amounts_ms: Sequence[float], every_s: float = 15.0) -> Arrivals:
    """The arrivals after scrapes between which these amounts arrived."""
    found, booked_ms = Arrivals(0.0), 0.0
    for number, amount_ms in enumerate(amounts_ms, 1):
        booked_ms += amount_ms
        found = found.advanced({"a": booked_ms}, [pod("a")], number * every_s)
    return found


def test_the_first_rate_is_the_mean_since_the_start() -> None:
    """A router that was restarted does not report a tenth of its load at first."""
    assert arrived([30_000.0]).rates == {KEY: pytest.approx(2.0)}


def test_a_rate_follows_a_change_within_minutes() -> None:
    steady, ended = [15_000.0] * 40, [0.0] * int(5 * RATE_WINDOW_S / 15)
    assert arrived(steady).rates[KEY] == pytest.approx(1.0)
    assert arrived([*steady, *ended]).rates[KEY] < 0.01


@given(st.lists(st.floats(0, 1e5), min_size=2, max_size=20), st.data())
def test_a_rate_does_not_depend_on_who_scrapes(amounts_ms: list[float], data: st.DataObject) -> None:
    """A second scraper that reads at the same times, or moments later, changes nothing."""
    once = arrived(amounts_ms)
    twice, booked_ms = Arrivals(0.0), 0.0
    for number, amount_ms in enumerate(amounts_ms, 1):
        booked_ms += amount_ms
        for later_s in (0.0, data.draw(st.sampled_from([0.0, 1e-6]))):
            twice = twice.advanced({"a": booked_ms}, [pod("a")], number * 15.0 + later_s)
    assert twice.rates[KEY] == pytest.approx(once.rates[KEY], rel=1e-3, abs=1e-3)


def test_a_pod_that_is_replaced_leaves_the_rate_of_its_pool() -> None:
    """During a rolling update the new pod gets what the old one got."""
    found = Arrivals(0.0)
    for number in range(1, 41):
        name = "old" if number <= 20 else "new"
        found = found.advanced({name: 15_000.0 * ((number - 1) % 20 + 1)}, [pod(name)], number * 15.0)
        assert found.rates[KEY] == pytest.approx(1.0)


def test_a_pod_that_comes_again_under_its_id_starts_again() -> None:
    """Its earlier bookings were removed with it."""
    before = Arrivals(0.0).advanced({"a": 30_000.0}, [pod("a")], 15.0)
    after = before.advanced({"a": 30_000.0 / 2}, [pod("a")], 1e6)
    assert after.rates[KEY] == pytest.approx(15.0 / 1e6, rel=1e-3)


# --- from fleet and ledger ---


def test_signals_follow_bookings() -> None:
    """Only this router's bookings count; the prefill of requests that have ended counts as arrived."""
    fleet, ledger = Fleet(), Ledger()
    one = make_pod("a")
    fleet.sync([one])
    fleet.describe("a", models=("m",))
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.observe_load("a", PodLoad(scraped_at_s=NOW_S))
    view = ScalingView(fleet, ledger, TARGETS, MAX_LOAD_AGE_S, NOW_S - 10)
    lease = ledger.book(one, 100_000, 50_000, NOW_S - 5)
    ledger.apply_replicas([{"a": InFlight(requests=1, prefill_tokens=70_000, prefill_ms=9e9)}], 0.0)
    [busy] = view.signals(NOW_S)
    assert busy.queued_tokens == 50_000
    assert busy.backlog_s == pytest.approx(max(0.0, lease.prefill_ms / 1000 - 5))
    assert busy.prefill_load == pytest.approx(lease.prefill_ms / 1000 / 10)
    ledger.release(lease, NOW_S)
    [after] = view.signals(NOW_S)
    assert (after.queued_tokens, after.backlog_s, after.prefill_load) == (0, 0.0, busy.prefill_load)
    ledger.remove("a")
    assert ledger.booked_prefill_ms == {}


# --- an autoscaler that follows ---

START_S, PERIOD_S, WINDOW_S, TOLERANCE = 120.0, 15.0, 300.0, 0.1
"""A replica's start, and HPA's defaults: period, stabilization of scaling down, tolerance."""
LEAST, MOST = 1, 60
IDLE = [status(str(n)) for n in range(MOST)]


def follow(load: Sequence[float]) -> list[int]:
    """Replicas after each period, when `load[i]` seconds of prefill arrive per second in period i.

    A fluid model: each ready replica computes 1 s per second. HPA with `AverageValue: 1` sets ceil(sum) replicas if the
    difference exceeds the tolerance, and scales down to the highest value of the window."""
    wanted, ready_at_s, backlog_s = LEAST, [0.0] * LEAST, 0.0
    arrivals, booked_ms, recent, history = Arrivals(0.0), 0.0, list[int](), list[int]()
    for period, rate in enumerate(load):
        now_s = (period + 1) * PERIOD_S
        ready = sum(at_s <= now_s for at_s in ready_at_s)
        booked_ms += rate * PERIOD_S * 1000
        backlog_s = max(0.0, backlog_s + (rate - ready) * PERIOD_S)
        arrivals = arrivals.advanced({"0": booked_ms}, [pod("0")], now_s)
        own = {"0": InFlight(prefill_ms=backlog_s * 1000)}
        desired = need(one_pool(IDLE[:ready], own, arrivals.rates[KEY]))
        found = wanted if abs(desired / wanted - 1) <= TOLERANCE else ceil(desired)
        recent = [*recent, found][-int(WINDOW_S / PERIOD_S) :]
        target = min(max(found, LEAST), MOST) if found > wanted else min(max(*recent, LEAST), wanted)
        ready_at_s = [*ready_at_s, *[now_s + START_S] * (target - wanted)][:target]
        wanted = target
        history.append(wanted)
    return history


def turns(replicas: Sequence[int]) -> int:
    """How often a series changes its direction."""
    changes = [b - a for a, b in pairwise(replicas) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(changes))


@pytest.mark.parametrize("peak", [0.3, 3.0, 12.0])
def test_replicas_follow_a_rising_and_falling_load_without_oscillation(peak: float) -> None:
    """Up once, down once, and in between as many as the load needs, give or take the tolerance."""
    rise, fall = [peak * n / 40 for n in range(40)], [peak * (1 - n / 40) for n in range(40)]
    replicas = follow([*rise, *[peak] * 120, *fall, *[0.0] * 80])
    expected = max(peak / TARGETS.prefill_utilization, LEAST)
    assert expected * (1 - TOLERANCE) <= replicas[150] <= ceil(expected * (1 + TOLERANCE))
    assert len(set(replicas[120:160])) == 1
    assert turns(replicas) <= (1 if peak > TARGETS.prefill_utilization else 0)
    assert replicas[-1] == LEAST


@given(st.floats(0, 20), st.floats(0, 20))
def test_replicas_settle_after_a_sudden_change(before: float, after: float) -> None:
    """What waited meanwhile may ask for more at first, once; then the number stays."""
    replicas = follow([*[before] * 100, *[after] * 160])
    for settled, rate in ((replicas[80:100], before), (replicas[-20:], after)):
        assert len(set(settled)) == 1
        expected = rate / TARGETS.prefill_utilization
        assert settled[0] >= max(LEAST, expected / (1 + TOLERANCE) - 1e-6)
        assert settled[0] <= max(LEAST, ceil(expected / (1 - TOLERANCE) + 1e-6))
    assert turns(replicas[:100]) <= 1
    assert turns(replicas[100:]) <= 1
    assert min(replicas) >= LEAST
