"""Message numbers of one stream, live and replayed."""

from __future__ import annotations

from router.feeds.kv_zmq import StreamPosition, Verdict

APPLY, DUPLICATE = Verdict.APPLY, Verdict.DUPLICATE


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
