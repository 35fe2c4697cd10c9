"""Prompts that agree with a run for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.index.runs import common_blocks


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_as_many_blocks_are_common_as_agree_from_the_start_on(start: int, agreed: int, more: int, other: int) -> None:
    """Be the run or the prompt the longer one, and wherever they part."""
    run = [*range(agreed), *range(100, 100 + more)]
    hashes = [-1] * start + [*range(agreed), *range(200, 200 + other)]
    assert common_blocks(run, hashes, start) == agreed
