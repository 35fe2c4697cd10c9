"""Message numbers of one stream, live and replayed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.feeds.kv_zmq import StreamPosition, Verdict

APPLY, DUPLICATE, GAP, RESTART = Verdict.APPLY, Verdict.DUPLICATE, Verdict.GAP, Verdict.RESTART


def verdicts(*live: int) -> list[Verdict]:
    sequence = StreamPosition()
    return [sequence.observe(number) for number in live]


def test_a_stream_begins_at_zero_and_counts_up() -> None:
    assert verdicts(0, 1, 2) == [APPLY] * 3
    assert StreamPosition().complete


@pytest.mark.parametrize("live", [[1], [0, 2], [0, 1, 9]])
def test_a_higher_number_is_a_gap(live: list[int]) -> None:
    """The position does not advance."""
    assert verdicts(*live)[-1] is GAP
    sequence = StreamPosition()
    for number in [*live, live[-1]]:
        sequence.observe(number)
    assert sequence.expected == len(live) - 1 and sequence.complete


@pytest.mark.parametrize("live", [[0, 0], [0, 1, 0], [0, 1, 2, 1], [5, 3]])
def test_a_lower_live_number_is_a_restart(live: list[int]) -> None:
    """Zero twice means two epochs of one message each."""
    assert verdicts(*live)[-1] is RESTART


def test_the_same_live_number_again_is_a_duplicate() -> None:
    """Unless it is zero."""
    assert verdicts(0, 1, 1) == [APPLY, APPLY, DUPLICATE]


def test_a_restart_resets_the_position() -> None:
    """And the stream is complete again."""
    sequence = StreamPosition()
    sequence.skip_to(7)
    sequence.observe(7)
    assert not sequence.complete
    sequence.restart()
    assert (sequence.expected, sequence.complete) == (0, True)
    assert sequence.observe(0) is APPLY


def test_a_live_message_that_a_replay_delivered_is_a_duplicate() -> None:
    """The next unknown number is applied."""
    sequence = StreamPosition()
    assert [sequence.observe(number, replayed=True) for number in range(4)] == [APPLY] * 4
    assert [sequence.observe(number) for number in (1, 2, 3, 4)] == [DUPLICATE] * 3 + [APPLY]


def test_a_repeated_replayed_number_is_not_a_restart() -> None:
    """Only live messages are ordered."""
    sequence = StreamPosition()
    for number in range(3):
        sequence.observe(number)
    assert [sequence.observe(number, replayed=True) for number in (0, 2, 3)] == [DUPLICATE, DUPLICATE, APPLY]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_lost_messages_only_mark_the_stream_incomplete(arrives: list[bool]) -> None:
    """Each received message is applied once, in order."""
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
