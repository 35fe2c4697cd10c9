"""Seconds of requests by phase."""

from __future__ import annotations

from router.observe.ended import Ended
from router.observe.metrics import Metrics
from router.phases import PHASES


def test_every_phase_has_a_histogram_of_the_requests_that_entered_it() -> None:
    """Also a phase that none has entered."""
    metrics = Metrics()
    for phases_s in ({"admit": 0.5, "relay": 0.25}, {"admit": 0.5}):
        metrics.ended(Ended("r", 0.0, "m", "x", "ok", phases_s=phases_s))
    value = metrics.registry.get_sample_value
    counts = {phase: value("warmroute_phase_seconds_count", {"phase": phase}) for phase in PHASES}
    assert counts == {**dict.fromkeys(PHASES, 0), "admit": 2, "relay": 1}
    assert value("warmroute_phase_seconds_sum", {"phase": "admit"}) == 1.0
