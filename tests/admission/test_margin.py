"""A margin follows the share of requests that miss their limit."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from router.admission.admission_queue import LearntMargin

STEP, HIGH, ALLOWED = 0.05, 1.0, 0.1


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=400))
@example([0.5] * 300)
@example([0.9, -1.0, 0.3] * 100)
def test_not_many_more_than_the_allowed_share_miss_however_the_errors_come(errors: list[float]) -> None:
    """A request misses if its error exceeds the margin. The bound is that of the source, and a margin stays bounded."""
    margin, missed = LearntMargin(0.0, HIGH, STEP, ALLOWED), 0
    for error in errors:
        has_missed = error > margin.value
        margin.observe(has_missed)
        missed += has_missed
        assert 0.0 <= margin.value <= HIGH
    assert missed <= ALLOWED * len(errors) + HIGH / STEP + 1


def test_a_margin_becomes_small_where_nobody_misses() -> None:
    """And grows again with the first that do."""
    margin = LearntMargin(0.5, HIGH, STEP, ALLOWED)
    for _ in range(200):
        margin.observe(False)
    assert margin.value == 0.0
    margin.observe(True)
    assert margin.value == STEP * (1 - ALLOWED)
