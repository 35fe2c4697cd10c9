"""The histograms of the phases."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from router.observe.phase import COUNTED_AT_ONCE, PhaseMetrics


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
