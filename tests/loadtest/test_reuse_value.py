"""The value of a cached prompt follows the reuse that was seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.studies.reuse_value import AGES_S, CLASSES, ReuseValue, age_bucket, class_of

USED, NEVER = 0, 1


def _learnt() -> ReuseValue:
    """Prompts of one class are used again after 20 s, those of another never."""
    reuse = ReuseValue()
    bucket = age_bucket(20.0)
    for _ in range(500):
        reuse.reached(USED, 0, bucket + 1, 1.0)
        reuse.used(USED, bucket, 1.0)
        reuse.reached(NEVER, 0, len(AGES_S), 1.0)
    reuse.learn()
    return reuse


def test_a_class_that_is_used_again_is_worth_more_than_one_that_is_not() -> None:
    used, never = _learnt().per_s([USED, NEVER], [10.0, 10.0])
    assert used > 20 * never


def test_the_value_rises_until_the_usual_reuse_and_falls_behind_it() -> None:
    early, due, late = _learnt().per_s([USED] * 3, [0.0, 16.0, 200.0])
    assert due > early > late


def test_without_data_a_prompt_of_the_prior_is_worth_its_initial_rate() -> None:
    # 0.3 of the prompts, exponential with 150 s: 0.002 uses a second at first.
    assert ReuseValue().per_s([0], [0.0])[0] == pytest.approx(0.3 / 150.0, rel=0.05)


@given(st.integers(0, 10_000), st.floats(0, 1e9))
def test_every_prompt_has_a_class(turn: int, interval_s: float) -> None:
    assert 0 <= class_of(turn, interval_s) < CLASSES


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, len(AGES_S) - 1), st.floats(0, 1)), max_size=50))
def test_values_are_positive_and_finite_whatever_was_counted(
    counts: list[tuple[int, int, float]],
) -> None:
    reuse = ReuseValue(classes=2)
    for cls, bucket, share in counts:
        reuse.used(cls, bucket, share)
    reuse.learn()
    values = reuse.per_s([0, 1] * len(AGES_S), np.repeat(AGES_S, 2).tolist())
    assert np.all(values > 0)
    assert np.all(np.isfinite(values))
