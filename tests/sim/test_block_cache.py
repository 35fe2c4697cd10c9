"""Does a pod's cache hold what a cache kept by hand would hold?"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.block_cache import BlockCache, TierCache

CAPACITY = 30
PROMPTS = [[0, 1, 2, 3], [0, 1, 12, 13], [0, 21, 22], [30, 31, 32, 33, 34]]
"""Chains of blocks, some with the same head."""


def size(block: int) -> int:
    return 1 + block % 4


@dataclass
class ByHand:
    """The same cache as lists: everything is counted anew each time."""

    pinned: list[int] = field(default_factory=list)
    """Once for each pin."""
    freed: list[int] = field(default_factory=list)
    """Longest ago first."""
    private: int = 0
    evicted: list[int] = field(default_factory=list)

    @property
    def available(self) -> int:
        return CAPACITY - self.private - sum(size(block) for block in set(self.pinned))

    def make_room(self) -> None:
        while sum(size(block) for block in self.freed) > self.available:
            self.evicted.append(self.freed.pop(0))

    def pin(self, block: int) -> None:
        self.pinned.append(block)
        if block in self.freed:
            self.freed.remove(block)

    def release(self, block: int) -> None:
        self.pinned.remove(block)
        if block not in self.pinned:
            self.freed.append(block)


class Both:
    """One story told to both caches; `open` are prompts under way and how many of their blocks are pinned."""

    def __init__(self) -> None:
        self.cache, self.by_hand = BlockCache(CAPACITY), ByHand()
        self.open: list[tuple[list[int], int]] = []

    def begin(self, prompt: list[int]) -> None:
        """Pin what is here and take room for the rest, where there is any."""
        found = self.cache.leading_blocks(prompt)
        new = sum(map(size, prompt[found:]))
        if self.cache.available_tokens - self.cache.free_tokens_of(prompt[:found]) < new:
            return
        self.cache.pin(prompt[:found])
        self.cache.allocate(new)
        for block in prompt[:found]:
            self.by_hand.pin(block)
        self.by_hand.private += new
        self.by_hand.make_room()
        self.open.append((prompt, found))

    def commit(self, at: int) -> None:
        """The next block of a prompt is computed."""
        prompt, done = self.open[at]
        if done == len(prompt):
            return
        block = prompt[done]
        known = block in self.by_hand.pinned or block in self.by_hand.freed
        assert self.cache.commit(block, size(block)) is not known
        self.by_hand.private -= size(block)
        self.by_hand.pin(block)
        self.open[at] = prompt, done + 1

    def end(self, at: int) -> None:
        """Release all, whether computed or not."""
        prompt, done = self.open.pop(at)
        self.cache.release(prompt[:done])
        for block in reversed(prompt[:done]):
            self.by_hand.release(block)
        left = sum(map(size, prompt[done:]))
        self.cache.free(left)
        self.by_hand.private -= left

    def agree(self) -> None:
        held = {*self.by_hand.pinned, *self.by_hand.freed}
        assert set(self.cache.blocks) == held
        assert sum(map(size, held)) + self.by_hand.private <= CAPACITY
        assert self.cache.available_tokens == self.by_hand.available
        assert self.cache.usage == 1 - self.by_hand.available / CAPACITY
        evicted, self.by_hand.evicted = self.by_hand.evicted, []
        assert self.cache.take_evicted() == evicted


steps = st.lists(st.tuples(st.sampled_from(["begin", "begin", "commit", "commit", "end"]), st.integers(0, 99)))


@settings(max_examples=150)
@given(steps)
def test_it_equals_a_cache_kept_by_hand(story: list[tuple[str, int]]) -> None:
    """Blocks, room and evictions in their order, under any pins, commits and releases; and never more than it holds."""
    both = Both()
    for what, number in story:
        if what == "begin":
            both.begin(PROMPTS[number % len(PROMPTS)])
        elif both.open:
            (both.commit if what == "commit" else both.end)(number % len(both.open))
        both.agree()
    while both.open:
        both.end(0)
    both.agree()
    assert both.cache.available_tokens == CAPACITY


def filled(*prompts: list[int]) -> BlockCache:
    """One after the other computed and released; every block is 10 tokens."""
    cache = BlockCache(100)
    for prompt in prompts:
        cache.allocate(10 * len(prompt))
        for block in prompt:
            cache.commit(block, 10)
        cache.release(prompt)
    return cache


def test_tails_go_before_heads() -> None:
    """What is left of a prompt can still be matched."""
    cache = filled([1, 2, 3])
    cache.allocate(80)
    assert cache.take_evicted() == [3]
    assert cache.leading_blocks([1, 2, 3]) == 2


def test_what_was_freed_longest_ago_goes_first() -> None:
    """And whoever pins a block again makes it young."""
    cache = filled([1], [2], [3])
    cache.pin([1])
    cache.release([1])
    cache.allocate(90)
    assert cache.take_evicted() == [2, 3]


def test_what_somebody_pins_stays() -> None:
    """As long as any one does."""
    cache = filled([1], [2])
    cache.pin([1])
    cache.pin([1])
    cache.release([1])
    cache.allocate(90)
    assert cache.take_evicted() == [2]
    assert (cache.leading_blocks([1]), cache.available_tokens, cache.usage) == (1, 0, 1.0)


def test_a_run_ends_at_the_first_block_that_is_missing() -> None:
    """What lies behind a gap is of no use."""
    assert filled([1], [3]).leading_blocks([1, 2, 3]) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 15))
def test_a_tier_never_holds_more_than_its_room(story: list[tuple[int, bool]], room: int) -> None:
    """Least recently written or read goes first; what it tells of itself is what it holds."""
    tier, by_age = TierCache(room), list[int]()
    for block, is_read in story:
        if is_read:
            tier.touch([block] if block in by_age else [])
            by_age.sort(key=lambda one: one == block)
            continue
        is_new, gone = tier.put(block, size(block))
        assert is_new is (block not in by_age)
        by_age = [one for one in by_age if one != block] + [block]
        expected = []
        while sum(map(size, by_age)) > room:
            expected.append(by_age.pop(0))
        assert gone == expected
        assert set(tier.blocks) == set(by_age)


def test_of_a_run_that_was_read_the_head_stays_longest() -> None:
    """A tail without its head could not be found."""
    tier = TierCache(30)
    for block in (1, 2, 3):
        tier.put(block, 10)
    tier.touch([1, 2, 3])
    assert tier.put(4, 10) == (True, [3])
    assert tier.leading_blocks([1, 2, 3]) == 2
