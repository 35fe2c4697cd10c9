"""Prompts that begin alike, more or less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.shared import EVERY_PROMPT_UNTIL, SETTLED_PROMPTS, SharedPrefixes, common_blocks

EIGHT_PODS = 1 / 8


def blocks(*path: str, length: int) -> list[int]:
    """Chain hashes of a prompt whose pieces, of ten blocks each, are named by `path`."""
    return [hash((path[: 1 + at // 10], at)) for at in range(length)]


def tails() -> Iterator[str]:
    return (f"tail {number}" for number in count())


def test_a_prefix_of_all_traffic_is_shared_within_a_few_dozen_prompts() -> None:
    """All of it at once, however deep; what comes after it is each prompt's own."""
    shared, tail = SharedPrefixes(), tails()
    told = [shared.observe(blocks("system", next(tail), length=20), threshold=EIGHT_PODS) for _ in range(200)]
    assert set(told[36:]) == {10}


def test_nothing_is_shared_by_traffic_that_was_not_seen_yet() -> None:
    """One prompt is all of the traffic so far, and says nothing."""
    shared = SharedPrefixes()
    assert [shared.observe(blocks("one", length=10), threshold=EIGHT_PODS) for _ in range(3)] == [0, 0, 0]


def test_prompts_without_anything_in_common_share_nothing() -> None:
    """However many there are; nor do prompts without a full block."""
    shared, tail = SharedPrefixes(), tails()
    assert {shared.observe(blocks(next(tail), length=20), threshold=EIGHT_PODS) for _ in range(300)} == {0}
    assert shared.observe([], threshold=EIGHT_PODS) == 0


@pytest.mark.parametrize(("threshold", "expected"), [(1 / 2, 10), (1 / 8, 20)])
def test_a_tenants_prefix_is_shared_where_it_is_more_than_one_pods_load(threshold: float, expected: int) -> None:
    """A quarter of the traffic each: too much for one pod of eight, not for one of two."""
    shared, tail = SharedPrefixes(), tails()
    for number in range(400):
        told = shared.observe(blocks("system", f"tenant {number % 4}", next(tail), length=30), threshold=threshold)
    assert told == expected


def test_yesterdays_prefix_is_forgotten() -> None:
    """Traffic changes; so does what tells prompts apart."""
    shared, tail = SharedPrefixes(), tails()
    for _ in range(400):
        shared.observe(blocks("old", next(tail), length=20), threshold=EIGHT_PODS)
    for _ in range(8000):
        shared.observe(blocks("new", next(tail), length=20), threshold=EIGHT_PODS)
    assert shared.observe(blocks("old", next(tail), length=20), threshold=EIGHT_PODS) == 0
    assert shared.observe(blocks("new", next(tail), length=20), threshold=EIGHT_PODS) == 10


def test_asking_what_is_shared_teaches_nothing() -> None:
    """However often: the next prompt finds what it would have found."""
    shared = SharedPrefixes()
    for number in range(20):
        shared.observe([1, 2, 100 + number], threshold=0.5)
    counts = {block: run.count for block, run in shared._runs.items()}
    assert {shared.shared([1, 2, 7], threshold=0.5) for _ in range(50)} == {2}
    assert {block: run.count for block, run in shared._runs.items()} == counts


def test_memory_does_not_grow_with_traffic() -> None:
    """What was seen once is not kept for long."""
    shared, tail = SharedPrefixes(), tails()
    sizes = []
    for _ in range(6000):
        shared.observe(blocks("system", next(tail), length=20), threshold=EIGHT_PODS)
        sizes.append(len(shared))
    assert max(sizes) == max(sizes[:3000])


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=EVERY_PROMPT_UNTIL), st.floats(0.01, 1.0))
def test_of_blocks_each_is_counted(prompts: list[list[int]], threshold: float) -> None:
    """However they are kept: a block is shared if it came in more than that share of the prompts, and twice."""
    shared, counts = SharedPrefixes(), Counter[int]()
    for number, path in enumerate(prompts, start=1):
        hashes = [hash((*path[: at + 1], "block")) for at in range(len(path))]
        counts.update(hashes)
        heavy = [block for block in hashes if counts[block] > max(threshold * number, 2.0)]
        told = shared.observe(hashes, threshold=threshold)
        assert told == (len(heavy) if number >= SETTLED_PROMPTS else 0)
        assert len(shared) == len(counts)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_common_blocks_counts_the_equal_leading_blocks(start: int, agreed: int, more: int, other: int) -> None:
    """Whichever of the two is longer, and wherever they diverge."""
    run = [*range(agreed), *range(100, 100 + more)]
    hashes = [-1] * start + [*range(agreed), *range(200, 200 + other)]
    assert common_blocks(run, hashes, start) == agreed
