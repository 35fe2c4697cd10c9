"""The seven phases of a request, and how long it was in each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.phases import PHASES, Phases

BEGAN_S = 1000.0
STEPS = st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0.0, 60.0)), max_size=20)


@given(STEPS, st.floats(0.0, 60.0))
def test_the_phases_share_the_time_since_the_request_arrived(steps: list[tuple[str, float]], last_s: float) -> None:
    """Each phase has one entry, however often it was entered."""
    phases, now_s = Phases(BEGAN_S), BEGAN_S
    for phase, after_s in steps:
        now_s += after_s
        phases.enter(phase, now_s)
        assert phases.current == phase
    now_s += last_s
    phases.end(now_s)
    assert phases.began_s == BEGAN_S
    assert set(phases.taken_s) == {PHASES[0], *(phase for phase, _ in steps)}
    assert min(phases.taken_s.values()) >= 0.0
    assert sum(phases.taken_s.values()) == pytest.approx(now_s - BEGAN_S, abs=1e-6)


def test_a_phase_that_is_entered_again_adds_up() -> None:
    """Its first and its second time."""
    phases = Phases(0.0)
    for phase, now_s in (("relay", 1.0), ("admit", 3.0), ("relay", 6.0)):
        phases.enter(phase, now_s)
    phases.end(10.0)
    assert phases.taken_s == {"admit": 4.0, "relay": 6.0}


def test_the_intervals_follow_each_other() -> None:
    """The current phase ends now; a phase that was entered twice has two."""
    phases = Phases(0.0)
    for phase, now_s in (("attempt", 1.0), ("relay", 3.0), ("attempt", 6.0)):
        phases.enter(phase, now_s)
    intervals = [("admit", 0.0, 1.0), ("attempt", 1.0, 3.0), ("relay", 3.0, 6.0), ("attempt", 6.0, 10.0)]
    assert phases.intervals(10.0) == intervals
