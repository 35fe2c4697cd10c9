"""What windows are assumed to have that no event names."""

from __future__ import annotations

from router.hashing import generation_seed, hash_blocks, token_array
from router.stores.prefix_store import LocalStore
from router.types import AttentionKind, BlocksCleared, BlocksStored, Generation, LayerType, PromptPrefix
from tests.policy.scenes import make_pod

GENERATION = Generation(model="m", block_size_tokens=16)
WINDOW = LayerType(AttentionKind.WINDOW, 16, 64)
"""A hit needs four blocks."""
PLENTY = 1000


class Windows:
    """A store with a pod whose layers all have windows."""

    def __init__(self, capacity_blocks: int = PLENTY) -> None:
        self.store, self._capacity_blocks, self._now_s = LocalStore(), capacity_blocks, 0.0
        self.store.add_holder(make_pod("a"), GENERATION)
        self.announce()

    def announce(self) -> None:
        self.store.apply("a", [BlocksStored(block_hashes=(1,), layers=WINDOW)])

    def computes(self, tokens: range) -> None:
        sent = self.store.predict("a", _prefix(tokens), ttl_s=1200.0, capacity_blocks=self._capacity_blocks)
        self.store.confirm(sent, self._now_s)
        self._now_s += 0.1

    def hit(self, tokens: range) -> int:
        return 16 * self.store.match(_prefix(tokens), self._now_s).held_blocks("a")


def _prefix(tokens: range) -> PromptPrefix:
    found = token_array(tokens)
    return PromptPrefix(GENERATION, found, hash_blocks(found, 16, generation_seed(GENERATION)))


def test_a_hit_ends_where_a_computed_prompt_did() -> None:
    pod = Windows()
    pod.computes(range(200))
    assert [pod.hit(range(length)) for length in (200, 300, 192, 150)] == [192, 192, 0, 0]


def test_a_hit_ends_anywhere_in_windows_that_overlap() -> None:
    """One prompt kept tokens 128 to 192, the other 176 to 240."""
    pod = Windows()
    pod.computes(range(193))
    pod.computes(range(241))
    assert [pod.hit(range(end + 1)) for end in (176, 192, 208, 224, 240)] == [0, 192, 208, 224, 240]


def test_a_prompt_that_is_shorter_than_the_window_hits_in_part() -> None:
    pod = Windows()
    pod.computes(range(65))
    assert [pod.hit(range(length)) for length in (65, 60, 20)] == [64, 48, 16]


def test_the_windows_that_were_used_longest_ago_are_evicted_first() -> None:
    pod = Windows(capacity_blocks=8)
    first, second, third = range(200), range(1000, 1200), range(2000, 2200)
    for prompt in (first, second, first, third):
        pod.computes(prompt)
    assert [pod.hit(prompt) for prompt in (first, second, third)] == [192, 0, 192]


def test_what_was_assumed_is_not_taken_for_full_attention_that_is_announced_later() -> None:
    """It announces the first block only."""
    pod, prompt = Windows(), range(65)
    pod.computes(prompt)
    first = BlocksStored(block_hashes=(7,), tokens=token_array(prompt[:16]), block_size_tokens=16, group=1)
    pod.store.apply("a", [first])
    assert (pod.hit(prompt), pod.store.full_and_hit("a", _prefix(prompt))) == (0, (1, 0))


def test_a_cache_that_is_cleared_has_no_windows() -> None:
    pod = Windows()
    pod.computes(range(200))
    pod.store.apply("a", [BlocksCleared()])
    pod.announce()
    assert pod.hit(range(200)) == 0
