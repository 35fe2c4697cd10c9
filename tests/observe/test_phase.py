"""Seconds by phase."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.observe.phase import PHASES, Phases


@given(st.lists(st.sampled_from([*PHASES, ""]), max_size=20))
def test_the_phases_that_ended_share_the_time_since_the_request_arrived(entered: list[str]) -> None:
    """Each once, however often it was entered; the one under way not yet, and none where none was."""
    phases = Phases()
    for phase in entered:
        phases.enter(phase)
    taken_s = phases.taken_s
    assert set(taken_s) == set(entered[:-1]) - {""}
    assert min(taken_s.values(), default=0.0) >= 0.0
    assert sum(taken_s.values()) <= phases.elapsed_s() + 1e-9


def test_a_phase_that_is_entered_again_adds_up() -> None:
    """What it took before stays."""
    phases = Phases()
    for phase in ("attempt", "relay"):
        phases.enter(phase)
    before_s = phases.taken_s["attempt"]
    for phase in ("attempt", ""):
        phases.enter(phase)
    assert phases.taken_s["attempt"] > before_s > 0.0
