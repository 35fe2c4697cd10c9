"""Prompts with shared prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.shared import EVERY_PROMPT_UNTIL, MAX_COUNTED_BLOCKS, SETTLED_PROMPTS, SharedPrefixes, common_blocks

EIGHT_PODS = 1 / 8


def blocks(*path: str, length: int) -> list[int]:
    """Chain hashes of a prompt of ten-block pieces that are named by `path`."""
    return [hash((path[: 1 + at // 10], at)) for at in range(length)]


def tails() -> Iterator[str]:
    return (f"tail {number}" for number in count())


def test_a_global_prefix_is_found_within_a_few_dozen_prompts() -> None:
    """Its full length, without the rest of each prompt."""
    shared, tail = SharedPrefixes(), tails()
    found = [shared.observe(blocks("system", next(tail), length=20), threshold=EIGHT_PODS) for _ in range(200)]
    assert set(found[36:]) == {10}


def test_nothing_is_shared_before_enough_prompts() -> None:
    shared = SharedPrefixes()
    assert [shared.observe(blocks("one", length=10), threshold=EIGHT_PODS) for _ in range(3)] == [0, 0, 0]


def test_different_prompts_share_nothing() -> None:
    """Nor do prompts without a full block."""
    shared, tail = SharedPrefixes(), tails()
    assert {shared.observe(blocks(next(tail), length=20), threshold=EIGHT_PODS) for _ in range(300)} == {0}
    assert shared.observe([], threshold=EIGHT_PODS) == 0


@pytest.mark.parametrize(("threshold", "expected"), [(1 / 2, 10), (1 / 8, 20)])
def test_a_tenants_prefix_is_shared_if_it_exceeds_one_pods_load(threshold: float, expected: int) -> None:
    """A quarter of the traffic is too much for one of eight pods, not for one of two."""
    shared, tail = SharedPrefixes(), tails()
    for number in range(400):
        found = shared.observe(blocks("system", f"tenant {number % 4}", next(tail), length=30), threshold=threshold)
    assert found == expected


@pytest.mark.parametrize("lost", [0, 1])
def test_a_session_does_not_share_its_prefix_with_itself(lost: int) -> None:
    """Three sessions of a hundred turns on eight pods; a turn may lack the last block of the one before."""
    shared, found = SharedPrefixes(), set[int]()
    sessions = [[*range(number << 32, (number << 32) + 50)] for number in range(3)]
    for turn in range(300):
        session = sessions[turn % 3]
        del session[len(session) - lost :]
        session += [turn << 16 | at for at in range(10)]
        found.add(shared.observe(tuple(session), threshold=EIGHT_PODS))
    assert found == {0}


def test_the_system_prompt_of_sessions_is_shared() -> None:
    """By its full length and no more, however many turns they have."""
    shared = SharedPrefixes()
    sessions = [[*range(40), 1000 * number] for number in range(1, 20)]
    for turn in range(200):
        session = sessions[turn * turn % 19]
        session += [turn << 20 | at for at in range(10)]
        found = shared.observe(tuple(session), threshold=EIGHT_PODS)
    assert found == 40


def test_a_document_with_many_questions_is_shared() -> None:
    """Questions of any length: each is a request of its own."""
    shared = SharedPrefixes()
    for number in range(100):
        question = [number << 20 | at for at in range(1 + number * 7 % 5)]
        found = shared.observe((*range(40), *question), threshold=EIGHT_PODS)
    assert found == 40


def test_an_old_prefix_is_forgotten() -> None:
    shared, tail = SharedPrefixes(), tails()
    for _ in range(400):
        shared.observe(blocks("old", next(tail), length=20), threshold=EIGHT_PODS)
    for _ in range(8000):
        shared.observe(blocks("new", next(tail), length=20), threshold=EIGHT_PODS)
    assert shared.observe(blocks("old", next(tail), length=20), threshold=EIGHT_PODS) == 0
    assert shared.observe(blocks("new", next(tail), length=20), threshold=EIGHT_PODS) == 10


def test_the_first_prompts_are_all_counted() -> None:
    """Then only a sample, so that memory grows more slowly."""
    shared = SharedPrefixes()
    for number in range(EVERY_PROMPT_UNTIL):
        shared.observe(blocks(f"prompt {number}", length=5), threshold=EIGHT_PODS)
    assert len(shared) == 5 * EVERY_PROMPT_UNTIL
    for number in range(EVERY_PROMPT_UNTIL):
        shared.observe(blocks(f"later prompt {number}", length=5), threshold=EIGHT_PODS)
    assert len(shared) < 8 * EVERY_PROMPT_UNTIL


def test_shared_records_nothing() -> None:
    shared = SharedPrefixes()
    for number in range(20):
        shared.observe([1, 2, 100 + number], threshold=0.5)
    counts = {block: run.count for block, run in shared._runs.items()}
    assert {shared.shared([1, 2, 7], threshold=0.5) for _ in range(50)} == {2}
    assert {block: run.count for block, run in shared._runs.items()} == counts


def test_memory_does_not_grow_with_traffic() -> None:
    shared, tail = SharedPrefixes(), tails()
    sizes = []
    for _ in range(6000):
        shared.observe(blocks("system", next(tail), length=20), threshold=EIGHT_PODS)
        sizes.append(len(shared))
    assert max(sizes) == max(sizes[:3000])


@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), max_size=EVERY_PROMPT_UNTIL), st.floats(0.01, 1.0))
def test_every_block_is_counted(prompts: list[list[int]], threshold: float) -> None:
    """A block is shared if it occurs in more than the threshold share of the prompts, and at least twice. Prompts of
    one length do not continue each other."""
    shared, counts = SharedPrefixes(), Counter[int]()
    for number, path in enumerate(prompts, start=1):
        hashes = [hash((*path[: at + 1], "block")) for at in range(len(path))]
        counts.update(hashes)
        heavy = [block for block in hashes if counts[block] > max(threshold * number, 2.0)]
        found = shared.observe(hashes, threshold=threshold)
        assert found == (len(heavy) if number >= SETTLED_PROMPTS else 0)
        assert len(shared) == len(counts)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_common_blocks_counts_the_equal_leading_blocks(start: int, agreed: int, more: int, other: int) -> None:
    """Whichever of the two is longer, and wherever they diverge."""
    run = [*range(agreed), *range(100, 100 + more)]
    hashes = [-1] * start + [*range(agreed), *range(200, 200 + other)]
    assert common_blocks(run, hashes, start) == agreed


def test_shares_stay_the_same_when_counts_are_halved() -> None:
    """At the end of a window, prompts and blocks fade by the same factor."""
    shared = SharedPrefixes()
    for number in range(20_000):
        shared.observe([1, 2] if number % 4 else [3, 4], threshold=0.5)
        if number > 1000:
            share = shared._runs[1].count / shared._counted
            assert share == pytest.approx(0.75, abs=0.1)


def test_only_the_first_blocks_of_a_long_prompt_are_stored() -> None:
    """Prompts have any length."""
    shared = SharedPrefixes()
    for number in range(4):
        shared.observe(range(number << 32, (number << 32) + 100 * MAX_COUNTED_BLOCKS), threshold=EIGHT_PODS)
    assert len(shared) == 4 * MAX_COUNTED_BLOCKS
