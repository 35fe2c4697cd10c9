"""Each change of a pod is one log line with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.feeds.pod_problems import log_changes
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet, PodEvent
from router.observe.changes import Changes
from tests.policy.scenes import fleet_of, make_pod


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def fleet(changes: Changes) -> Fleet:
    """Two ready pods, whose changes are logged from now on."""
    fleet = fleet_of(make_pod("a"), make_pod("b"))
    fleet.listen(log_changes(fleet, changes))
    return fleet


def logged(change: Callable[[], object]) -> dict[str, Any]:
    """The only line that a change causes."""
    with capture_logs() as lines:
        change()
    [line] = lines
    return dict(line)


def test_a_drain_has_the_reason_of_its_source(fleet: Fleet) -> None:
    line = logged(lambda: fleet.event("a", PodEvent.DRAIN, reason="not ready in Kubernetes"))
    assert (line["log_level"], line["new"], line["reason"]) == ("info", "draining", "not ready in Kubernetes")
    assert logged(lambda: fleet.event("b", PodEvent.DRAIN))["reason"] == "admin call"


def test_an_ejection_is_a_warning_with_the_failures_that_caused_it(fleet: Fleet) -> None:
    breaker = Breaker(fleet, Probes(failures_to_eject=2, min_ready_share=0.0))
    breaker.failure("a", 0.0)
    line = logged(lambda: breaker.failure("a", 0.0))
    assert (line["log_level"], line["reason"]) == ("warning", "2 requests in a row failed")
    assert fleet.state_reason("a") == "2 requests in a row failed"


def test_a_restart_is_no_change_of_state(fleet: Fleet) -> None:
    line = logged(lambda: fleet.restarted("a"))
    assert line["event"] == "pod restarted; its cache is empty"


def test_an_event_that_changes_nothing_is_no_line(fleet: Fleet) -> None:
    with capture_logs() as lines:
        fleet.event("a", PodEvent.PROBE_OK)
        fleet.event("a", PodEvent.UNDRAIN)
    assert not lines


def test_what_changes_the_pods_that_can_serve_is_recorded_with_its_cause(fleet: Fleet, changes: Changes) -> None:
    """A pod joins when it is ready, and leaves when it is drained: that it is listed or removed then is no change."""
    fleet.event("a", PodEvent.EJECT, reason="3 health checks in a row failed")
    fleet.explain_state("a", "connection refused")
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.restarted("a")
    fleet.event("a", PodEvent.DRAIN)
    fleet.event("a", PodEvent.UNDRAIN)
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.event("b", PodEvent.DRAIN, reason="not ready in Kubernetes")
    fleet.event("b", PodEvent.LOST)
    fleet.event("a", PodEvent.LOST)
    assert [(one.what, one.subject, one.cause) for one in reversed(changes.latest())] == [
        ("ejected", "a", "3 health checks in a row failed"),
        ("readmitted", "a", "health check passed"),
        ("restarted", "a", "a new process answers; its cache is empty"),
        ("left", "a", "admin call"),
        ("joined", "a", "health check passed"),
        ("left", "b", "not ready in Kubernetes"),
        ("left", "a", "removed, or no longer listed"),
    ]
