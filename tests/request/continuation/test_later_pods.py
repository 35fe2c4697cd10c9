"""Streams leave a drained pod in an order, and not all at once."""

from __future__ import annotations

from router.request.continuation.later_pods import CHECK_S, SHARE, MovePace


def test_cheapest_leave_first_as_many_as_take_a_share_of_the_time() -> None:
    budget_ms = CHECK_S * 1000 * SHARE
    moves = [(0.6 * budget_ms, "middle"), (3 * budget_ms, "long"), (0.5 * budget_ms, "short")]
    assert list(MovePace().due(moves)) == ["short", "middle"]


def test_a_stream_that_takes_longer_than_the_share_leaves_and_the_next_one_later() -> None:
    pace, cost_ms = MovePace(), 2.5 * CHECK_S * 1000 * SHARE
    counts = [len(list(pace.due([(cost_ms, "a"), (cost_ms, "b")]))) for _ in range(7)]
    assert counts == [1, 0, 1, 0, 0, 1, 0]


def test_time_in_which_no_stream_leaves_is_not_saved_up() -> None:
    pace = MovePace()
    assert not [list(pace.due(())) for _ in range(100) if list(pace.due(()))]
    assert list(pace.due([(CHECK_S * 1000 * SHARE, number) for number in range(5)])) == [0]
