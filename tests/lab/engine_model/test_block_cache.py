"""The block cache equals a naive cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine_model.block_cache import BlockCache, TierCache

CAPACITY = 30
PROMPTS = [[0, 1, 2, 3], [0, 1, 12, 13], [0, 21, 22], [30, 31, 32, 33, 34]]
"""Chains of blocks, some with the same head."""


def size(block: int) -> int:
    return 1 + block % 4


@dataclass
class NaiveCache:
    """The same cache as plain lists."""

    pinned: list[int] = field(default_factory=list)
    """One entry for each pin."""
    freed: list[int] = field(default_factory=list)
    """In the order of their release."""
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
    """Applies one script to both caches. `open` are the current prompts and the number of their pinned blocks."""

    def __init__(self) -> None:
        self.cache, self.naive = BlockCache(CAPACITY), NaiveCache()
        self.open: list[tuple[list[int], int]] = []

    def begin(self, prompt: list[int]) -> None:
        """Pin the cached blocks and allocate memory for the rest, if there is enough."""
        found = self.cache.leading_blocks(prompt)
        new = sum(map(size, prompt[found:]))
        if self.cache.available_tokens - self.cache.free_tokens_of(prompt[:found]) < new:
            return
        self.cache.pin(prompt[:found])
        self.cache.allocate(new)
        for block in prompt[:found]:
            self.naive.pin(block)
        self.naive.private += new
        self.naive.make_room()
        self.open.append((prompt, found))

    def commit(self, at: int) -> None:
        """The next block of a prompt is computed."""
        prompt, done = self.open[at]
        if done == len(prompt):
            return
        block = prompt[done]
        known = block in self.naive.pinned or block in self.naive.freed
        assert self.cache.commit(block, size(block)) is not known
        self.naive.private -= size(block)
        self.naive.pin(block)
        self.open[at] = prompt, done + 1

    def end(self, at: int) -> None:
        """Release all, whether computed or not."""
        prompt, done = self.open.pop(at)
        self.cache.release(prompt[:done])
        for block in reversed(prompt[:done]):
            self.naive.release(block)
        left = sum(map(size, prompt[done:]))
        self.cache.free(left)
        self.naive.private -= left

    def agree(self) -> None:
        held = {*self.naive.pinned, *self.naive.freed}
        assert set(self.cache.blocks) == held
        assert sum(map(size, held)) + self.naive.private <= CAPACITY
        assert self.cache.available_tokens == self.naive.available
        assert self.cache.usage == 1 - self.naive.available / CAPACITY
        evicted, self.naive.evicted = self.naive.evicted, []
        assert self.cache.take_evicted() == evicted


steps = st.lists(st.tuples(st.sampled_from(["begin", "begin", "commit", "commit", "end"]), st.integers(0, 99)))


@given(steps)
def test_it_equals_a_naive_cache(script: list[tuple[str, int]]) -> None:
    """Blocks, memory and evictions in their order, under any pins, commits and releases; never beyond its capacity."""
    both = Both()
    for what, number in script:
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
    """A cache after computing and releasing these prompts in order; every block has 10 tokens."""
    cache = BlockCache(100)
    for prompt in prompts:
        cache.allocate(10 * len(prompt))
        for block in prompt:
            cache.commit(block, 10)
        cache.release(prompt)
    return cache


def test_tails_are_evicted_before_heads() -> None:
    """The rest of a prompt can still be matched."""
    cache = filled([1, 2, 3])
    cache.allocate(80)
    assert cache.take_evicted() == [3]
    assert cache.leading_blocks([1, 2, 3]) == 2


def test_the_block_freed_longest_ago_is_evicted_first() -> None:
    """A pin renews a block."""
    cache = filled([1], [2], [3])
    cache.pin([1])
    cache.release([1])
    cache.allocate(90)
    assert cache.take_evicted() == [2, 3]


def test_a_pinned_block_stays() -> None:
    """As long as any request pins it."""
    cache = filled([1], [2])
    cache.pin([1])
    cache.pin([1])
    cache.release([1])
    cache.allocate(90)
    assert cache.take_evicted() == [2]
    assert (cache.leading_blocks([1]), cache.available_tokens, cache.usage) == (1, 0, 1.0)


def test_leading_blocks_end_at_the_first_missing_one() -> None:
    """Later blocks cannot be used."""
    assert filled([1], [3]).leading_blocks([1, 2, 3]) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 15))
def test_a_tier_never_exceeds_its_capacity(script: list[tuple[int, bool]], room: int) -> None:
    """The least recently used block is evicted first, and the returned changes match its content."""
    tier, by_age = TierCache(room), list[int]()
    for block, is_read in script:
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


def test_after_a_read_the_tail_is_evicted_first() -> None:
    """A tail without its head cannot be matched."""
    tier = TierCache(30)
    for block in (1, 2, 3):
        tier.put(block, 10)
    tier.touch([1, 2, 3])
    assert tier.put(4, 10) == (True, [3])
    assert tier.leading_blocks([1, 2, 3]) == 2
