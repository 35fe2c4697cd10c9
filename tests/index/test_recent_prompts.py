"""Which prompts are remembered, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.lineage import Lineage
from router.index.recent_prompts import RecentPrompts
from tests.index.test_lineage import blocks


def kept(recent: RecentPrompts) -> list[int]:
    """Lengths of the prompts, newest first."""
    return [len(prompt.hashes) for prompt in recent.sample(1 << 30, 1 << 30)[0]]


def test_a_conversation_is_kept_once_with_its_latest_prompt() -> None:
    recent = RecentPrompts()
    lineage = Lineage(recent)
    for turn in range(4):
        lineage.observe(blocks(("system", 8), ("a", 10 + 5 * turn)), float(turn))
    lineage.observe(blocks(("system", 8), ("b", 3)), 9.0)
    assert kept(recent) == [11, 33]
    assert recent.blocks == 44


def test_a_repeated_prompt_becomes_the_newest() -> None:
    recent = RecentPrompts()
    for hashes in ([1, 2], [3, 4, 5], [1, 2]):
        recent.put(hashes, None, 0.0)
    assert kept(recent) == [2, 3]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 8), st.integers(1, 100))
def test_prompts_and_blocks_are_bounded_and_the_newest_stay(
    lengths: list[int], max_prompts: int, max_blocks: int
) -> None:
    """One prompt of any length is always kept."""
    recent = RecentPrompts(max_prompts, max_blocks)
    for number, length in enumerate(lengths):
        recent.put(range(1000 * number, 1000 * number + length), None, float(number))
    found = kept(recent)
    assert found == lengths[::-1][: len(found)]
    assert recent.blocks == sum(found)
    assert len(found) <= max_prompts
    assert len(found) <= 1 or sum(found) <= max_blocks
    assert found or not lengths


@pytest.mark.parametrize(("max_prompts", "max_blocks"), [(1000, 50), (25, 1000)])
def test_a_sample_stands_for_all_prompts(max_prompts: int, max_blocks: int) -> None:
    recent = RecentPrompts()
    for number in range(100):
        recent.put([2 * number, 2 * number + 1], None, float(number))
    prompts, step = recent.sample(max_prompts, max_blocks)
    assert (len(prompts), step) == (25, 4)
    assert prompts[0].at_s == 99.0
