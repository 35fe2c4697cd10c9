"""Conversations that grow, and shared prompt starts."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from router.index.lineage import CONVERSATIONS, MAX_DEPTH_MARKERS, MAX_GROWTH_BLOCKS, Ancestry, Lineage


def blocks(*pieces: tuple[str, int]) -> list[int]:
    """Chain hashes of a prompt from (name, number of blocks) pieces."""
    path: tuple[object, ...] = ()
    hashes = []
    for name, length in pieces:
        for at in range(length):
            path = (*path[-3:], hash(path), name, at)
            hashes.append(hash(path))
    return hashes


def test_a_conversation_is_followed_from_turn_to_turn() -> None:
    """Turns count up, and the gap is the mean time between them."""
    lineage = Lineage()
    turns = [lineage.observe(blocks(("a", 10 + 5 * turn)), at_s) for turn, at_s in enumerate((0.0, 4.0, 10.0))]
    assert turns == [Ancestry(), Ancestry(1, 4.0), Ancestry(2, 5.0)]


def test_conversations_with_one_system_prompt_stay_separate() -> None:
    lineage = Lineage()
    for name in ("a", "b"):
        lineage.observe(blocks(("system", 40), (name, 2)), 0.0)
    assert lineage.observe(blocks(("system", 40), ("a", 5)), 3.0).turn == 1
    assert lineage.observe(blocks(("system", 40), ("c", 5)), 3.0).turn == 0


def test_a_repeated_prompt_is_not_a_turn() -> None:
    lineage = Lineage()
    for _ in range(3):
        assert lineage.observe(blocks(("same", 9)), 1.0).turn == 0


def test_questions_about_one_document_share_it() -> None:
    """From the second on, rounded down to a power of two blocks, without the global prefix."""
    lineage = Lineage()
    found = [lineage.observe(blocks(("document", 100), (f"q{n}", 3)), 0.0) for n in range(3)]
    assert [one.shared_blocks for one in found] == [0, 64, 64]
    assert lineage.observe(blocks(("document", 100), ("q9", 3)), 0.0, global_prefix_blocks=80).shared_blocks == 0


def test_a_prompt_that_grew_too_much_is_new() -> None:
    """This limits the cost of the search."""
    lineage = Lineage()
    lineage.observe(blocks(("a", 10)), 0.0)
    assert lineage.observe(blocks(("a", 10), ("b", MAX_GROWTH_BLOCKS + 1)), 1.0).turn == 0


def test_a_prompt_without_blocks_has_no_history() -> None:
    assert Lineage().observe([], 0.0) == Ancestry()


@given(st.lists(st.integers(1, 12), max_size=40))
def test_each_prompt_adds_a_bounded_number_of_entries(lengths: list[int]) -> None:
    """One conversation and a marker per power of two."""
    lineage = Lineage()
    for number, length in enumerate(lengths):
        lineage.observe(blocks((str(number), length)), float(number))
    assert len(lineage) <= 5 * len(lengths)


def test_memory_is_bounded() -> None:
    """The oldest entries are evicted; at least half of the markers stay."""
    lineage = Lineage()
    for number in range(CONVERSATIONS + MAX_DEPTH_MARKERS):
        lineage.observe([number * 2 + 1, number * 2 + 2], 0.0)
        if number % 97 == 0:
            assert len(lineage) <= CONVERSATIONS + MAX_DEPTH_MARKERS + 2
    assert len(lineage) >= CONVERSATIONS + MAX_DEPTH_MARKERS // 2


def test_a_recently_used_start_is_not_evicted() -> None:
    lineage = Lineage()
    lineage.observe([-1, -2, -3], 0.0)
    for number in range(MAX_DEPTH_MARKERS):
        lineage.observe([number * 2 + 1, number * 2 + 2], 0.0)
        if number % (MAX_DEPTH_MARKERS // 8) == 0:
            assert lineage.observe([-1, -2, -4 - number], 0.0).shared_blocks == 2


def test_peek_returns_the_history_without_recording() -> None:
    looked, alone = Lineage(), Lineage()
    for turn in range(4):
        hashes = list(range(10 * (turn + 1)))
        now_s = 5.0 * turn
        seen = [looked.peek(hashes, now_s) for _ in range(3)]
        assert [looked.observe(hashes, now_s)] * 3 == seen == [alone.observe(hashes, now_s)] * 3
        assert len(looked) == len(alone)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=20))
def test_a_prompt_continues_the_longest_prompt_inside_it(prompts: list[list[int]]) -> None:
    """Wherever that ended after the deepest marker; each prompt is continued once."""
    lineage, ends, depth_markers = Lineage(), dict[int, int](), set[int]()
    for at_s, path in enumerate(prompts):
        hashes = blocks(*((str(step), 1) for step in path))
        powers = [depth for depth in (1, 2, 4, 8) if depth <= len(hashes)]
        shared = max((depth for depth in powers if hashes[depth - 1] in depth_markers), default=0)
        inside = [hash_ for hash_ in hashes[max(shared - 1, 0) : max(2 * shared - 1, 0)] if hash_ != hashes[-1]]
        before = next((hash_ for hash_ in reversed(inside) if hash_ in ends), None)
        turn = 0 if before is None else ends.pop(before) + 1
        assert lineage.observe(hashes, float(at_s)).turn == turn
        ends[hashes[-1]] = turn
        depth_markers.update(hashes[depth - 1] for depth in powers)


def test_a_long_prompt_takes_no_more_memory_than_a_short_one() -> None:
    """About one marker more for each doubling of its length."""

    def taken_bytes(length: int) -> int:
        lineage = Lineage()
        tracemalloc.start()
        for number in range(50):
            lineage.observe(range(number << 32, (number << 32) + length), 0.0)
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return found

    assert taken_bytes((1 << 20) - 1) < 6 * taken_bytes((1 << 5) - 1)
