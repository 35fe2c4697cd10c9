"""The time between the pieces of a stream."""

from __future__ import annotations

from router.observe.token_gaps import gaps


def test_every_piece_after_the_first_has_a_gap() -> None:
    """The arrival times are passed on unchanged."""
    arrived: list[float] = []
    observed: list[float] = []
    step = gaps(arrived.append, observed.append)
    for now_s in (3.0, 3.5, 3.75):
        step(now_s)
    assert (arrived, observed) == ([3.0, 3.5, 3.75], [0.5, 0.25])
