"""Streams leave a drained pod in an order, and not all at once."""

from __future__ import annotations

from router.request.continuation.later_pods import CHECK_S, SHARE, due


def test_cheapest_leave_first_as_many_as_take_a_share_of_the_time() -> None:
    budget_ms = CHECK_S * 1000 * SHARE
    moves = [(0.6 * budget_ms, "middle"), (3 * budget_ms, "long"), (0.5 * budget_ms, "short")]
    assert list(due(moves)) == ["short", "middle"]


def test_a_stream_that_costs_more_than_the_share_leaves_too() -> None:
    assert list(due([(1e9, "long"), (2e9, "longer")])) == ["long"]
