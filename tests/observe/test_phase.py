"""Seconds by phase."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.observe.phase import COUNTED_AT_ONCE, PHASES, PhaseMetrics, Phases


@given(st.lists(st.sampled_from(PHASES), max_size=20))
def test_the_phases_share_the_time_since_the_request_arrived(entered: list[str]) -> None:
    """Each phase has one entry, however often it was entered."""
    phases, began = Phases(), [PHASES[0], *entered]
    for phase in entered:
        phases.enter(phase)
    phases.end()
    assert set(phases.taken_s) == set(began)
    assert min(phases.taken_s.values()) >= 0.0
    assert 0 < sum(phases.taken_s.values()) <= phases.elapsed_s() + 1e-9


def test_a_phase_that_is_entered_again_adds_up() -> None:
    """The phases add up to the time since the request arrived."""
    phases = Phases()
    for phase in ("relay", "admit", "relay"):
        phases.enter(phase)
    before_s = phases.elapsed_s()
    phases.end()
    assert sum(phases.taken_s.values()) >= before_s


def test_every_request_is_exposed_at_once() -> None:
    """Also those that are not added to the histograms yet."""
    registry = CollectorRegistry()
    metrics, name = PhaseMetrics(registry), "warmroute_phase_seconds_count"
    for number in range(1, COUNTED_AT_ONCE + 3):
        metrics.add({"admit": 0.5, "relay": 0.25})
        if number % 40 == 1:
            assert registry.get_sample_value(name, {"phase": "admit"}) == number
    assert registry.get_sample_value(name, {"phase": "relay"}) == COUNTED_AT_ONCE + 2
    assert registry.get_sample_value(name, {"phase": "decide"}) == 0
