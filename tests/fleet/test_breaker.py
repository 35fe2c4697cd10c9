"""Who is ejected, and how long it stays out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.fleet.breaker import Breaker, FailureRecord
from router.fleet.fleet import Fleet, PodEvent
from router.types import Pod, PodState

MakePod = Callable[..., Pod]


@pytest.fixture
def fleet(make_pod: MakePod) -> Fleet:
    """Two ready pods."""
    fleet = Fleet()
    fleet.sync([make_pod("a"), make_pod("b")])
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.event("b", PodEvent.PROBE_OK)
    return fleet


def state(fleet: Fleet, pod_id: str) -> PodState:
    status = fleet.status(pod_id)
    assert status is not None
    return status.state


def eject(breaker: Breaker, now_s: float) -> None:
    for _ in range(3):
        breaker.failure("a", now_s)


def test_consecutive_failures_eject(fleet: Fleet) -> None:
    """The third in a row, of this pod alone."""
    breaker = Breaker(fleet, failures_to_eject=3)
    breaker.failure("a", 0.0)
    breaker.failure("a", 0.0)
    breaker.failure("b", 0.0)
    assert state(fleet, "a") is PodState.READY
    breaker.failure("a", 0.0)
    assert (state(fleet, "a"), state(fleet, "b")) == (PodState.EJECTED, PodState.READY)


def test_a_served_request_settles_everything(fleet: Fleet) -> None:
    """Failures of requests and of probes alike: a pod that serves is well, however slow its /health is."""
    breaker = Breaker(fleet, failures_to_eject=2)
    for _ in range(5):
        breaker.failure("a", 0.0)
        breaker.success("a")
        breaker.probe_failed("a", 0.0)
        breaker.success("a")
    assert state(fleet, "a") is PodState.READY


def test_a_passed_probe_does_not_excuse_failing_requests(fleet: Fleet) -> None:
    """A pod whose /health answers while its requests fail goes out."""
    breaker = Breaker(fleet, failures_to_eject=3)
    for _ in range(3):
        breaker.failure("a", 0.0)
        breaker.probe_ok("a")
    assert state(fleet, "a") is PodState.EJECTED


def test_failed_probes_eject_when_consecutive(fleet: Fleet) -> None:
    """A pod that misses a probe now and then stays."""
    breaker = Breaker(fleet, failures_to_eject=2)
    for _ in range(3):
        breaker.probe_failed("a", 0.0)
        breaker.probe_ok("a")
    assert state(fleet, "a") is PodState.READY
    breaker.probe_failed("a", 0.0)
    breaker.probe_failed("a", 0.0)
    assert state(fleet, "a") is PodState.EJECTED


def test_the_back_off_doubles_until_a_request_is_served(fleet: Fleet) -> None:
    """1, 2, 4, 4 seconds at a limit of 4, however often it is readmitted; then 1 again."""
    breaker = Breaker(fleet, first_backoff_s=1.0, max_backoff_s=4.0)
    for backoff_s in (1.0, 2.0, 4.0, 4.0):
        eject(breaker, 100.0)
        assert not breaker.may_probe("a", 100.0 + backoff_s - 0.01)
        assert breaker.may_probe("a", 100.0 + backoff_s)
        breaker.probe_ok("a")
        fleet.event("a", PodEvent.PROBE_OK)
    breaker.success("a")
    eject(breaker, 200.0)
    assert breaker.may_probe("a", 201.0)


def test_a_readmitted_pod_starts_counting_anew(fleet: Fleet) -> None:
    """What ejected it does not count a second time."""
    breaker = Breaker(fleet, failures_to_eject=2)
    breaker.failure("a", 0.0)
    breaker.probe_failed("a", 0.0)
    breaker.failure("a", 0.0)
    fleet.event("a", PodEvent.PROBE_OK)
    breaker.failure("a", 0.0)
    breaker.probe_failed("a", 0.0)
    assert state(fleet, "a") is PodState.READY


def test_requests_that_were_under_way_do_not_prolong_an_ejection(fleet: Fleet) -> None:
    """Fifty failing at once are one ejection."""
    breaker = Breaker(fleet, first_backoff_s=1.0)
    for _ in range(50):
        breaker.failure("a", 10.0)
        breaker.probe_failed("a", 10.0)
    assert breaker.may_probe("a", 11.0)


def test_a_pod_that_is_not_ready_cannot_fail(fleet: Fleet) -> None:
    """A draining pod's failures are not held against it when it returns."""
    breaker = Breaker(fleet, failures_to_eject=2)
    fleet.event("a", PodEvent.DRAIN)
    breaker.failure("a", 0.0)
    fleet.event("a", PodEvent.UNDRAIN)
    fleet.event("a", PodEvent.PROBE_OK)
    breaker.failure("a", 0.0)
    assert state(fleet, "a") is PodState.READY


def test_nothing_is_held_against_a_pod_that_is_found_again(fleet: Fleet, make_pod: MakePod) -> None:
    """A new pod under an old id starts clean, and unknown pods may always be probed."""
    breaker = Breaker(fleet, failures_to_eject=2, first_backoff_s=1e9)
    breaker.failure("a", 0.0)
    breaker.failure("a", 0.0)
    assert not breaker.may_probe("a", 5.0)
    fleet.sync([])
    breaker.failure("a", 0.0)
    assert breaker.may_probe("a", 5.0)


# --- lateness ---

LATE: tuple[float, float] = (600.0, 6001.0)
"""Expected and actual milliseconds, at a factor of ten."""


def late(breaker: Breaker, pod_id: str, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        breaker.success(pod_id)
        breaker.first_token(pod_id, *LATE, now_s)


def test_a_pod_that_is_late_again_and_again_is_ejected(fleet: Fleet) -> None:
    """Though it serves every request."""
    breaker = Breaker(fleet, late_factor=10.0, late_to_eject=8)
    late(breaker, "a", 7)
    assert state(fleet, "a") is PodState.READY
    late(breaker, "a", 1)
    assert (state(fleet, "a"), state(fleet, "b")) == (PodState.EJECTED, PodState.READY)


@pytest.mark.parametrize("expected_ms, actual_ms", [(600.0, 6000.0), (1.0, 5000.0)])
def test_one_first_token_on_time_settles_it(fleet: Fleet, expected_ms: float, actual_ms: float) -> None:
    """Ten times of next to nothing is not late."""
    breaker = Breaker(fleet, late_factor=10.0, late_to_eject=8)
    late(breaker, "a", 7)
    breaker.first_token("a", expected_ms, actual_ms, 0.0)
    late(breaker, "a", 7)
    assert state(fleet, "a") is PodState.READY


def test_where_most_are_late_it_is_the_expectation_that_is_wrong(fleet: Fleet, make_pod: MakePod) -> None:
    """A price that is ten times too low may not empty a fleet; pods of other models are no witnesses."""
    breaker = Breaker(fleet, late_to_eject=8)
    for _ in range(100):
        late(breaker, "a", 1)
        late(breaker, "b", 1)
    assert {state(fleet, "a"), state(fleet, "b")} == {PodState.READY}
    alone = Fleet()
    alone.sync([make_pod("a", models=("m",)), make_pod("b", models=("other",))])
    for pod in ("a", "b"):
        alone.event(pod, PodEvent.PROBE_OK)
    late(Breaker(alone, late_to_eject=8), "a", 100)
    assert state(alone, "a") is PodState.READY


def test_lateness_is_out_for_longer_and_forgotten_only_when_on_time(fleet: Fleet) -> None:
    """Every probe passes, and so does every request that was under way."""
    breaker = Breaker(fleet, first_backoff_s=1.0, max_backoff_s=1.5, late_to_eject=1)
    late(breaker, "a", 1, now_s=0.0)
    breaker.success("a")
    assert [breaker.may_probe("a", now_s) for now_s in (9.9, 10.0)] == [False, True]
    fleet.event("a", PodEvent.PROBE_OK)
    late(breaker, "a", 1, now_s=20.0)
    assert [breaker.may_probe("a", now_s) for now_s in (34.9, 35.0)] == [False, True]
    fleet.event("a", PodEvent.PROBE_OK)
    breaker.first_token("a", 600.0, 600.0, 40.0)
    late(breaker, "a", 1, now_s=50.0)
    assert breaker.may_probe("a", 60.0)


def test_lateness_can_be_left_alone(fleet: Fleet) -> None:
    """`late_to_eject: 0`."""
    breaker = Breaker(fleet, late_to_eject=0)
    late(breaker, "a", 100)
    assert state(fleet, "a") is PodState.READY


def test_what_another_worker_holds_against_a_pod_counts_here(fleet: Fleet) -> None:
    """Its failures go on here; a pod that is not there is nobody's."""
    breaker = Breaker(fleet, failures_to_eject=3)
    breaker.apply_remote("a", FailureRecord(failures=2), 0.0)
    breaker.apply_remote("nobody", FailureRecord(failures=2), 0.0)
    assert set(breaker.records()) == {"a"}
    breaker.failure("a", 0.0)
    assert state(fleet, "a") is PodState.EJECTED


@pytest.mark.parametrize(
    "held", [FailureRecord(backoff_s=2.0, probe_at_s=12.0), FailureRecord(late_backoff_s=2.0, late_probe_at_s=12.0)]
)
def test_a_pod_that_another_worker_has_ejected_is_ejected_here(fleet: Fleet, held: FailureRecord) -> None:
    """For the same time and only once; not after that time is over."""
    breaker = Breaker(fleet)
    breaker.apply_remote("a", held, 10.0)
    assert state(fleet, "a") is PodState.EJECTED
    assert not breaker.may_probe("a", 11.9)
    assert breaker.may_probe("a", 12.0)
    fleet.event("a", PodEvent.PROBE_OK)
    breaker.apply_remote("a", held, 11.0)
    assert state(fleet, "a") is PodState.READY
    breaker.apply_remote("b", held, 13.0)
    assert state(fleet, "b") is PodState.READY


def test_each_change_is_announced_once(fleet: Fleet) -> None:
    """Other workers copy the record when it is announced."""
    breaker, announced = Breaker(fleet), list[tuple[str, FailureRecord | None]]()
    breaker.on_change = lambda pod: announced.append((pod, breaker.record_of(pod)))
    breaker.failure("a", 0.0)
    assert announced == [("a", FailureRecord(failures=1))]
    breaker.success("a")
    breaker.success("a")
    assert announced[1:] == [("a", None)]
    late(breaker, "b", 1)
    assert announced[2:] == [("b", FailureRecord(late_tokens=1))]
    breaker.first_token("b", 100.0, 100.0, 0.0)
    assert announced[3:] == [("b", None)]
    breaker.first_token("b", 100.0, 100.0, 0.0)
    assert len(announced) == 4
