"""The histograms of the phases."""

from __future__ import annotations

from router.observe.exposition import Registry
from router.observe.metrics import PhaseMetrics
from router.phases import PHASES


def test_every_phase_has_a_histogram_of_the_requests_that_entered_it() -> None:
    """Also a phase that none has entered."""
    registry = Registry()
    PhaseMetrics(registry).add_all([{"admit": 0.5, "relay": 0.25}, {"admit": 0.5}])
    counts = {phase: registry.get_sample_value("warmroute_phase_seconds_count", {"phase": phase}) for phase in PHASES}
    assert counts == {**dict.fromkeys(PHASES, 0), "admit": 2, "relay": 1}
    assert registry.get_sample_value("warmroute_phase_seconds_sum", {"phase": "admit"}) == 1.0
