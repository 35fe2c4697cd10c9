"""How busy the pods of a model are with prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.congestion_estimator import COLD_START_S, MAX_PODS, REFRESH_S, WINDOW_S, CongestionEstimator
from router.fleet.ledger import Ledger
from router.types import Congestion, FleetSnapshot, InFlight, Pod, PodSpeed, PodState, PodStatus, Role
from tests.kit.scenes import make_pod

MODEL = "m"


def fleet(pods: Sequence[Pod], state: PodState = PodState.READY) -> FleetSnapshot:
    return FleetSnapshot(0, tuple(PodStatus(replace(pod, models=(MODEL,)), state) for pod in pods))


def serve(ledger: Ledger, pod: Pod, began_s: float, took_s: float, tokens: int = 1000) -> None:
    """Compute one prompt on the pod."""
    lease = ledger.book(pod, tokens, 0, began_s)
    ledger.first_token(lease, began_s + took_s)
    ledger.release(lease, began_s + took_s)


def test_without_prompts_no_pod_is_busy() -> None:
    """The stated cold start."""
    assert Ledger().congestion(fleet([make_pod("a"), make_pod("b")]), MODEL, 5.0) == Congestion()
    assert Ledger().congestion(fleet([]), MODEL, 5.0) == Congestion()


def test_a_steady_load_is_measured() -> None:
    """Two prompts a second on one of two pods, each of which takes 0.2 s: a pod gets one a second and is busy 20 %."""
    ledger, pods = Ledger(), [make_pod("a"), make_pod("b")]
    for number in range(int(10 * WINDOW_S)):
        serve(ledger, pods[0], number / 2, 0.2)
    found = ledger.congestion(fleet(pods), MODEL, 5 * WINDOW_S)
    assert found.prompts_per_s == pytest.approx(1.0, rel=0.02)
    assert found.busy_share == pytest.approx(0.2, rel=0.02)
    assert found.backlog_ms == 0.0


def test_the_first_prompts_count_as_after_an_idle_time() -> None:
    """One prompt is no rate of infinity, and one busy second is not a busy pod."""
    ledger, pod = Ledger(), make_pod("a")
    serve(ledger, pod, 100.0, 1.0)
    found = ledger.congestion(fleet([pod]), MODEL, 101.0)
    assert found.prompts_per_s == pytest.approx(1 / (COLD_START_S + 1), rel=0.1)
    assert found.busy_share == pytest.approx(1 / (COLD_START_S + 1), rel=0.1)


def test_the_averages_decay() -> None:
    """A busy minute is forgotten within some windows."""
    ledger, pod = Ledger(), make_pod("a")
    for second in range(60):
        serve(ledger, pod, float(second), 0.9)
    busy = ledger.congestion(fleet([pod]), MODEL, 60.0)
    later = ledger.congestion(fleet([pod]), MODEL, 60.0 + 3 * WINDOW_S)
    assert later.prompts_per_s < busy.prompts_per_s / 10
    assert later.busy_share < busy.busy_share / 10


def test_a_pod_that_leaves_leaves_the_means() -> None:
    """So does one that is not ready; another model's pods were never among them."""
    ledger, a, b = Ledger(), make_pod("a"), make_pod("b")
    for second in range(60):
        serve(ledger, a, float(second), 0.5)
    both = ledger.congestion(fleet([a, b]), MODEL, 60.0)
    assert both.busy_share > 0.1
    assert ledger.congestion(fleet([b]), MODEL, 61.0) == Congestion()
    assert ledger.congestion(fleet([a], PodState.EJECTED), MODEL, 62.0) == Congestion()
    assert ledger.congestion(fleet([a]), "another", 63.0) == Congestion()


def test_only_pods_that_compute_prompts_count() -> None:
    """Those of role decode only where no other pod is left."""
    ledger, prefill, decode = Ledger(), make_pod("p", role=Role.PREFILL), make_pod("d", role=Role.DECODE)
    lease = ledger.book(prefill, 10_000, 0, 0.0)
    ledger.book(decode, 10_000, 0, 0.0, prefills=False)
    found = ledger.congestion(fleet([decode, prefill]), MODEL, 0.0)
    assert found.backlog_ms == lease.prefill_ms
    direct = ledger.book(decode, 10_000, 0, 0.0)
    assert ledger.congestion(fleet([decode, prefill]), MODEL, 0.0).backlog_ms == lease.prefill_ms
    assert ledger.congestion(fleet([decode]), MODEL, REFRESH_S).backlog_ms > direct.prefill_ms / 2


def test_the_backlog_is_what_is_outstanding_now() -> None:
    """The mean of the pods, less the progress on the head of each queue."""
    ledger, pods = Ledger(), [make_pod("a"), make_pod("b")]
    leases = [ledger.book(pods[0], 100_000, 0, 0.0) for _ in range(2)]
    half_ms = leases[0].prefill_ms / 2
    found = ledger.congestion(fleet(pods), MODEL, half_ms / 1000)
    assert found.backlog_ms == pytest.approx(1.5 * half_ms)


def test_prompts_of_other_routers_count() -> None:
    """Four routers that share the traffic see what one router would: rates add up, and busy is busy for any of them."""
    pod, alone = make_pod("a"), Ledger()
    routers = [Ledger() for _ in range(4)]
    for number in range(2400):
        began_s, own = number / 4, routers[number % 4]
        lease, same = own.book(pod, 1000, 0, began_s), alone.book(pod, 1000, 0, began_s)
        for one in routers:
            one.apply_replicas([other.own() for other in routers if other is not one], began_s)
        for ledger, one_lease in ((own, lease), (alone, same)):
            ledger.first_token(one_lease, began_s + 0.1)
        for one in routers:
            one.apply_replicas([other.own() for other in routers if other is not one], began_s + 0.1)
    expected = alone.congestion(fleet([pod]), MODEL, 600.0)
    for one in routers:
        found = one.congestion(fleet([pod]), MODEL, 600.0)
        assert found.prompts_per_s == pytest.approx(expected.prompts_per_s, rel=0.03)
        assert found.busy_share == pytest.approx(expected.busy_share, rel=0.03)


def test_a_pod_is_idle_when_the_last_router_is_done() -> None:
    """A router that dies leaves no pod busy for ever."""
    ledger, pod = Ledger(), make_pod("a")
    ledger.apply_replicas([{"a": InFlight(1, 1, 100, 10.0)}], 0.0)
    busy = ledger.congestion(fleet([pod]), MODEL, 60.0).busy_share
    ledger.apply_replicas([], 60.0)
    assert ledger.congestion(fleet([pod]), MODEL, 120.0).busy_share < busy


def test_pods_of_one_speed_share_their_mean() -> None:
    """Chance makes one of two equal pods busier; the share of both is that of their kind."""
    ledger, slow = Ledger(), PodSpeed(2.0, 0.04, 2e-6)
    pods = [make_pod("a"), make_pod("b", speed=PodSpeed(1.1, 0.021, 1e-6)), make_pod("c", speed=slow)]
    for number in range(int(10 * WINDOW_S)):
        serve(ledger, pods[0], float(number), 0.8)
        serve(ledger, pods[2], float(number), 0.1)
    shares = ledger.congestion(fleet(pods), MODEL, 10 * WINDOW_S).busy_shares
    assert shares == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.1}, rel=0.02)


def test_equal_pods_have_no_shares_of_their_own() -> None:
    """Nearly equal, as learnt: chance must not decide, and recordings stay small."""
    ledger, pods = Ledger(), [make_pod("a"), make_pod("b", speed=PodSpeed(1.0, 0.028, 1e-6))]
    serve(ledger, pods[0], 0.0, 1.0)
    assert ledger.congestion(fleet(pods), MODEL, 1.0).busy_shares == {}


def test_means_are_kept_for_a_moment() -> None:
    """Many requests a second share them."""
    ledger, pod = Ledger(), make_pod("a")
    before = ledger.congestion(fleet([pod]), MODEL, 0.0)
    ledger.book(pod, 1000, 0, 0.0)
    assert ledger.congestion(fleet([pod]), MODEL, REFRESH_S / 2) is before
    assert ledger.congestion(fleet([pod]), MODEL, REFRESH_S).prompts_per_s > 0


def test_the_number_of_pods_is_bounded() -> None:
    """Fleets come and go; the pods without recent changes are dropped."""
    estimator = CongestionEstimator()
    for number in range(2 * MAX_PODS):
        estimator.booked(str(number), float(number))
    assert estimator.prompts_per_s("0") == 0.0
    assert estimator.prompts_per_s(str(2 * MAX_PODS - 1)) > 0.0


@given(st.lists(st.tuples(st.sampled_from(["book", "idle", "wait"]), st.floats(0, 300))))
def test_shares_are_shares_and_nothing_is_negative(steps: list[tuple[str, float]]) -> None:
    """After any history."""
    estimator, now_s = CongestionEstimator(), 0.0
    for what, after_s in steps:
        now_s += after_s
        if what == "book":
            estimator.booked("a", now_s)
        elif what == "idle":
            estimator.set_busy("a", False, now_s)
    found = estimator.means(fleet([make_pod()]), MODEL, dict, now_s)
    assert 0 <= found.busy_share <= 1 + 1e-9
    assert min(found.prompts_per_s, found.backlog_ms) >= 0
