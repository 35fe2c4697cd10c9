"""Calibration by observed responses, and its metrics."""

from __future__ import annotations

from functools import partial

import pytest

from router.decision import Candidate, Cost, Direct, RouteDecision
from router.observe.metrics import Metrics
from router.policy.calibration import Calibration, class_key
from router.policy.calibrator import HANDOFF_STEPS, MIN_INTERVAL_S, REGRET_EVERY, Calibrator
from router.policy.prefill_clock import PrefillObservation
from router.types import Link, Links, PodSpeed
from tests.kit.scenes import make_pod

PRIOR = PodSpeed(5.0, 0.1, 0.0)
LINK = Link(1.0, 1e6, "rdma")


pod = partial(make_pod, speed=PRIOR, models=("m",), hardware="h100x4", kv_bytes_per_token=1000)


def calibrator(metrics: Metrics | None = None) -> Calibrator:
    made = Calibrator(Calibration(), metrics or Metrics(), Links(elsewhere=LINK))
    made.priors = {"a": PRIOR, "b": PRIOR}
    return made


def candidate(name: str, queue_ms: float, eviction_ms: float = 0.0) -> Candidate:
    parts = (("queue", queue_ms), ("eviction", eviction_ms))
    return Candidate(Direct(pod(name)), Cost.of(parts, queue_ms + eviction_ms))


def sample(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(name, {"model": "m"})
    assert value is not None
    return value


def test_pods_of_one_model_engine_and_hardware_share_a_calibration() -> None:
    """The speed of one is expected of the other, but not of pods on other hardware."""
    made = calibrator()
    for number, tokens in enumerate((1000, 2000, 500, 3000) * 10):
        made.observe_prefill(
            pod("a"), PrefillObservation(1, tokens, tokens * tokens, 5.0 + 0.3 * tokens), float(number)
        )
    known = made.calibration.speed(class_key(pod("b")), "b", PRIOR)
    assert known.prefill_ms(2000) == pytest.approx(605.0, rel=0.1)
    assert made.calibration.speed(class_key(pod("b", hardware="a100x8")), "b", PRIOR) == PRIOR


def test_at_most_a_hundred_observations_a_second_are_used() -> None:
    """For each class."""
    often, seldom = calibrator(), calibrator()
    for number in range(100):
        seen = PrefillObservation(1, 1000, 10**6, 500.0)
        often.observe_prefill(pod("a"), seen, number * MIN_INTERVAL_S / 10)
        if number % 10 == 0:
            seldom.observe_prefill(pod("a"), seen, number * MIN_INTERVAL_S)
    assert list(often.calibration.rows()) == list(seldom.calibration.rows()) != []


def test_a_class_wants_no_observation_right_after_one() -> None:
    """The caller need not compute one."""
    made = calibrator()
    assert made.wants_observation(pod("a"), 0.0)
    made.observe_prefill(pod("a"), PrefillObservation(1, 1000, 10**6, 500.0), 0.0)
    assert [made.wants_observation(pod("b"), now_s) for now_s in (0.0, MIN_INTERVAL_S / 2, MIN_INTERVAL_S)] == [
        False,
        False,
        True,
    ]
    assert made.wants_observation(pod("b", hardware="a100x8"), 0.0)


def test_a_pod_without_a_prior_is_not_calibrated() -> None:
    """It may have been removed meanwhile."""
    made = calibrator()
    made.observe_prefill(pod("gone"), PrefillObservation(1, 1000, 10**6, 500.0), 0.0)
    assert not list(made.calibration.rows())


def test_a_transfer_calibrates_its_link() -> None:
    """By the transferred bytes and the time."""
    made = calibrator()
    for _ in range(60):
        made.observe_transfer(pod("a"), pod("b"), 10_000, elapsed_ms=41.0, concurrent=0)
    assert made.calibration.link("rdma", LINK).transfer_ms(10_000_000) == pytest.approx(41.0, rel=0.15)


def test_transfers_are_counted_by_kind_of_link() -> None:
    """Bytes and seconds."""
    metrics = Metrics()
    made = calibrator(metrics)
    made.observe_transfer(pod("a"), pod("b"), 10_000, elapsed_ms=40.0, concurrent=0)
    value = metrics.registry.get_sample_value
    assert value("warmroute_transfer_bytes_total", {"link": "rdma"}) == 10_000_000
    assert value("warmroute_transfer_seconds_sum", {"link": "rdma"}) == pytest.approx(0.04)
    assert value("warmroute_transfer_slowdown_ratio_count", {"link": "rdma"}) == 1
    steps_ms = HANDOFF_STEPS * pod("b").speed.d0_ms
    slowdown = (40.0 - steps_ms) / LINK.transfer_ms(10_000_000)
    assert value("warmroute_transfer_slowdown_ratio_sum", {"link": "rdma"}) == pytest.approx(slowdown)


def test_a_short_transfer_says_nothing_about_the_speed_of_its_link() -> None:
    """Its time is that of decode steps."""
    metrics = Metrics()
    made = calibrator(metrics)
    made.observe_transfer(pod("a"), pod("b"), 10, elapsed_ms=40.0, concurrent=0)
    value = metrics.registry.get_sample_value
    assert value("warmroute_transfer_seconds_count", {"link": "rdma"}) == 1
    assert value("warmroute_transfer_slowdown_ratio_count", {"link": "rdma"}) is None


def test_a_transfer_without_kv_or_link_is_ignored() -> None:
    """All blocks were there already, or no link is configured."""
    made = calibrator()
    made.observe_transfer(pod("a"), pod("b"), 0, 41.0, 0)
    made.links = Links()
    made.observe_transfer(pod("a"), pod("b"), 100, 41.0, 0)
    assert not list(made.calibration.rows())


def test_only_client_delays_are_compared_with_the_ttft() -> None:
    """A cost also contains the delays of other requests."""
    metrics = Metrics()
    made = calibrator(metrics)
    chosen = candidate("a", 100.0, eviction_ms=900.0)
    made.compare_ttft("m", RouteDecision("p", "v", (chosen,)), chosen, 125.0)
    assert sample(metrics, "warmroute_time_to_first_token_predicted_seconds_sum") == pytest.approx(0.1)
    assert sample(metrics, "warmroute_time_to_first_token_error_ratio_sum") == pytest.approx(0.2)


def test_regret_is_the_time_that_the_best_other_candidate_saves() -> None:
    """0 where the others were expected to be slower. One in eight requests is sampled."""
    metrics = Metrics()
    made = calibrator(metrics)
    chosen, other = candidate("a", 50.0), candidate("b", 80.0)
    decision = RouteDecision("p", "v", (chosen, other))
    for _ in range(REGRET_EVERY):
        made.compare_ttft("m", decision, chosen, 200.0)
    assert sample(metrics, "warmroute_regret_seconds_sum") == pytest.approx(0.12)
    for _ in range(REGRET_EVERY):
        made.compare_ttft("m", decision, chosen, 60.0)
    assert sample(metrics, "warmroute_regret_seconds_sum") == pytest.approx(0.12)
    assert sample(metrics, "warmroute_regret_seconds_count") == 2


def test_a_removed_pod_has_no_clock() -> None:
    """Another pod with its id starts with a new one."""
    made = calibrator()
    clock = made.clock("a")
    assert made.clock("a") is clock
    made.remove(pod("a"))
    assert made.clock("a") is not clock
