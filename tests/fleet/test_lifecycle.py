"""The table of a pod's life."""

from __future__ import annotations

import pytest

from router.fleet.lifecycle import TRANSITIONS, PodEvent, transition
from router.types import PodState


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([PodEvent.FOUND], PodState.JOINING),
        ([PodEvent.FOUND, PodEvent.PROBE_OK], PodState.READY),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.EJECT], PodState.EJECTED),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.EJECT, PodEvent.PROBE_OK], PodState.READY),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.PROBE_OK], PodState.DRAINING),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.EJECT], PodState.DRAINING),
        ([PodEvent.FOUND, PodEvent.PROBE_OK, PodEvent.DRAIN, PodEvent.UNDRAIN], PodState.JOINING),
        ([PodEvent.FOUND, PodEvent.LOST, PodEvent.PROBE_OK], PodState.GONE),
    ],
)
def test_events_lead_to_the_states_of_the_table(events: list[PodEvent], state: PodState) -> None:
    """From before it was found, event by event."""
    now = PodState.GONE
    for event in events:
        now = transition(now, event)
    assert now is state


def test_a_pair_outside_the_table_changes_nothing() -> None:
    """Illegal events are no error: probes and operators race."""
    outside = [(s, e) for s in PodState for e in PodEvent if (s, e) not in TRANSITIONS]
    assert outside
    assert all(transition(state, event) is state for state, event in outside)


def test_only_a_successful_probe_makes_a_pod_ready() -> None:
    """No other event leads to READY, wherever it comes from."""
    assert {event for (_, event), after in TRANSITIONS.items() if after is PodState.READY} == {PodEvent.PROBE_OK}


def test_every_state_can_be_lost_and_gone_ends_the_life() -> None:
    """LOST leads from everywhere to GONE, and only being found anew leads out of it."""
    assert all(transition(state, PodEvent.LOST) is PodState.GONE for state in PodState)
    assert {event for state, event in TRANSITIONS if state is PodState.GONE} == {PodEvent.FOUND}
