"""Numbers of one stream, live and replayed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.sequence import StreamPosition, Verdict

APPLY, DUPLICATE, GAP, RESTART = Verdict.APPLY, Verdict.DUPLICATE, Verdict.GAP, Verdict.RESTART


def judged(*live: int) -> list[Verdict]:
    sequence = StreamPosition()
    return [sequence.observe(number) for number in live]


def test_a_stream_begins_at_zero_and_counts_up() -> None:
    """Whoever heard all of it is complete."""
    assert judged(0, 1, 2) == [APPLY] * 3
    assert StreamPosition().complete


@pytest.mark.parametrize("live", [[1], [0, 2], [0, 1, 9]])
def test_a_number_too_high_is_a_gap(live: list[int]) -> None:
    """Nothing moves on: what is missing is still expected."""
    assert judged(*live)[-1] is GAP
    sequence = StreamPosition()
    for number in [*live, live[-1]]:
        sequence.observe(number)
    assert sequence.expected == len(live) - 1 and sequence.complete


@pytest.mark.parametrize("live", [[0, 0], [0, 1, 0], [0, 1, 2, 1], [5, 3]])
def test_a_live_number_that_falls_back_is_a_new_life(live: list[int]) -> None:
    """No epoch travels with the messages; zero twice is two lives of one message each."""
    assert judged(*live)[-1] is RESTART


def test_the_same_live_number_again_is_a_duplicate() -> None:
    """Unless it is zero."""
    assert judged(0, 1, 1) == [APPLY, APPLY, DUPLICATE]


def test_after_a_restart_everything_is_expected_anew() -> None:
    """And complete, until something is lost again."""
    sequence = StreamPosition()
    sequence.skip_to(7)
    sequence.observe(7)
    assert not sequence.complete
    sequence.restart()
    assert (sequence.expected, sequence.complete) == (0, True)
    assert sequence.observe(0) is APPLY


def test_what_a_replay_overtook_is_a_duplicate() -> None:
    """It waited in the socket meanwhile; the first number that is not known is applied."""
    sequence = StreamPosition()
    assert [sequence.observe(number, replayed=True) for number in range(4)] == [APPLY] * 4
    assert [sequence.observe(number) for number in (1, 2, 3, 4)] == [DUPLICATE] * 3 + [APPLY]


def test_a_replay_that_repeats_what_is_known_is_no_restart() -> None:
    """Only live messages come in order."""
    sequence = StreamPosition()
    for number in range(3):
        sequence.observe(number)
    assert [sequence.observe(number, replayed=True) for number in (0, 2, 3)] == [DUPLICATE, DUPLICATE, APPLY]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_lost_messages_leave_a_mark_and_nothing_else(arrives: list[bool]) -> None:
    """Those that arrive are applied once each, in order; the stream is complete if no gap was given up."""
    sequence, applied, gaps = StreamPosition(), [], 0
    for number in (number for number, here in enumerate(arrives) if here):
        verdict = sequence.observe(number)
        if verdict is GAP:
            gaps += 1
            sequence.skip_to(number)
            verdict = sequence.observe(number)
        assert verdict is APPLY
        applied.append(number)
    assert applied == [number for number, here in enumerate(arrives) if here]
    assert sequence.complete is (gaps == 0)
