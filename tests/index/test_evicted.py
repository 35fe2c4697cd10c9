"""How often evicted blocks would have been requested again."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.blockmap import BlockMap
from router.index.cluster import ClusterIndex, EntryKind, LogEntry
from router.index.evicted import GHOST_SHARE, MAX_GHOSTS, MAX_REUSE, PRIOR_REUSE, SAMPLE, EvictedBlocks
from router.index.holders import HolderFacts
from router.index.predicted import PredictedIndex
from router.stores.prefix_store import LocalStore
from router.types import BlockChange, BlocksRemoved, BlocksStored, Generation, Tier
from tests.kit.scenes import BLOCK, prompt

MODEL = "m"


def removal(*blocks: int, tier: Tier = Tier.GPU) -> BlockChange:
    return BlockChange(tier, False, blocks)


class LruPod:
    """A pod that evicts the least recently used block, as its router sees it."""

    def __init__(self, capacity: int, evicted: EvictedBlocks) -> None:
        self._capacity, self._evicted = capacity, evicted
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.requests = self.hits = 0

    def request(self, block: int) -> None:
        self.requests += 1
        self.hits += block in self._blocks
        self._evicted.requested([block], {"a": (int(block in self._blocks), 0, 0, 0)})
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._capacity:
            oldest, _ = self._blocks.popitem(last=False)
            self._evicted.evicted("a", removal(oldest), len(self._blocks))


def hit_share(capacity: int, blocks: list[int]) -> tuple[float, float]:
    """(hit share, learnt reuse) of these requests for single blocks."""
    evicted = EvictedBlocks()
    pod = LruPod(capacity, evicted)
    for block in blocks:
        pod.request(block)
    return pod.hits / pod.requests, evicted.reuse


def test_without_evictions_the_prior_holds() -> None:
    """For any requests."""
    evicted = EvictedBlocks()
    assert evicted.reuse == PRIOR_REUSE
    for number in range(100):
        evicted.requested([number], {})
    assert evicted.reuse == PRIOR_REUSE


def test_the_learnt_value_is_the_slope_of_the_hit_share() -> None:
    """h' / (1 - h), with h' measured by simulating a cache that is larger by the length of the list."""
    random = Random(1)
    blocks = [int(random.paretovariate(0.6)) for _ in range(60_000)]
    share, learnt = hit_share(400, blocks)
    larger, _ = hit_share(int(400 * (1 + GHOST_SHARE)), blocks)
    expected = (larger - share) / GHOST_SHARE / (1 - share)
    assert expected > 0.05
    assert learnt == pytest.approx(expected, rel=0.25)


def test_blocks_that_nobody_asks_for_again_are_worth_little() -> None:
    """One-offs: every block is requested once."""
    _, learnt = hit_share(100, list(range(5000)))
    assert learnt < PRIOR_REUSE / 5


def test_a_cache_just_too_small_is_worth_a_lot() -> None:
    """A loop over slightly more blocks than fit: every miss would have been a hit."""
    _, learnt = hit_share(100, [number % 110 for number in range(5000)])
    assert learnt > 3.0


def test_what_another_pod_still_holds_is_not_missed() -> None:
    """Nor is what comes before the end of the longest match."""
    evicted = EvictedBlocks()
    evicted.evicted("a", removal(*range(100)), 400)
    for _ in range(100):
        evicted.requested(list(range(8)), {"a": (0, 0, 0, 0), "b": (8, 0, 0, 0)})
    assert evicted.reuse == PRIOR_REUSE


def test_a_block_leaves_a_pod_with_its_farthest_tier() -> None:
    """One that only moves from the GPU is still there."""
    evicted = EvictedBlocks()
    evicted.evicted("a", removal(1, tier=Tier.CPU), 400)
    evicted.evicted("a", removal(2, tier=Tier.GPU), 400)
    assert evicted.listed() == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1 << 63)), st.integers(0, 500)), max_size=30))
def test_the_value_is_bounded(steps: list[tuple[int, list[int], int]]) -> None:
    """After any history."""
    evicted = EvictedBlocks()
    for kind, blocks, held in steps:
        if kind == 0:
            evicted.evicted("a", removal(*blocks), held)
        elif kind == 1:
            evicted.holds("a", held)
        else:
            evicted.requested(blocks, {"a": (held % 3, 0, 0, 0)})
        assert 0 <= evicted.reuse <= MAX_REUSE


def test_a_large_fleet_keeps_a_sample() -> None:
    """Memory is bounded, and the value is that of all blocks."""
    random, evicted = Random(2), EvictedBlocks()
    held, next_block = 8 * MAX_GHOSTS, 0
    for _ in range(1500):
        fresh = [random.getrandbits(64) for _ in range(200)]
        evicted.evicted("a", removal(*fresh), held)
        evicted.requested([*fresh[:100], *(random.getrandbits(64) for _ in range(100))], {})
        next_block += 200
    assert evicted.listed() <= MAX_GHOSTS + 200
    assert evicted.reuse == pytest.approx(0.5 / GHOST_SHARE, rel=0.2)


@pytest.mark.parametrize(("later_s", "tokens"), [(59.0, 2 * BLOCK * SAMPLE), (61.0, 0)])
def test_blocks_that_are_needed_within_a_minute_of_their_eviction_are_counted(later_s: float, tokens: int) -> None:
    """An estimate from one prompt in `SAMPLE`. What another pod holds was not lost."""
    evicted, asked = EvictedBlocks(), prompt(4 * BLOCK)
    evicted.holds("a", 100)
    evicted.requested(asked.hashes, {}, 1000.0, BLOCK)
    evicted.evicted("a", removal(*asked.hashes[1:]), 100)
    for _ in range(SAMPLE - 1):
        evicted.requested(asked.hashes, {"b": (2, 0, 0, 0)}, 1000.0 + later_s, BLOCK)
    assert evicted.soon_tokens == tokens


def test_engines_that_publish_events_are_followed() -> None:
    """Their removals count; a cleared cache is gone, not evicted."""
    blocks = BlockMap()
    blocks.add_holder("a", Generation(model=MODEL, block_size_tokens=4))
    blocks.apply("a", BlocksStored(block_hashes=(1, 2), tokens=[0, 1, 2, 3, 4, 5, 6, 7], block_size_tokens=4))
    blocks.apply("a", BlocksRemoved(block_hashes=(2,)))
    assert blocks.evicted[MODEL].listed() == 1
    blocks.forget("a")
    assert blocks.evicted[MODEL].listed() == 1
    assert set(blocks.evicted) == {MODEL}


def test_the_cluster_index_is_followed() -> None:
    """Removals that publishers report count as well."""
    index, generation = ClusterIndex(holder_ttl_s=60), Generation(model=MODEL, block_size_tokens=4)
    stored = BlockChange(Tier.GPU, True, (1, 2))
    entries = (
        LogEntry(kind=EntryKind.EMPTY, holder="h", epoch=1, facts=HolderFacts(url="http://a")),
        LogEntry(kind=EntryKind.CHANGE, holder="h", epoch=1, seq=1, changes=(stored,)),
        LogEntry(kind=EntryKind.CHANGE, holder="h", epoch=1, seq=2, changes=(removal(2),)),
    )
    assert all(index.apply(generation, entry, 0.0) for entry in entries)
    assert index.evicted[MODEL].listed() == 1


def test_pods_without_events_are_followed_by_their_predicted_capacity() -> None:
    """What exceeds it is evicted, oldest first, from its end."""
    predicted = PredictedIndex()
    gone = [
        list(predicted.confirm(predicted.begin("a", blocks, ttl_s=60, capacity_blocks=4), now_s))
        for now_s, blocks in enumerate([[1, 2, 3], [7, 8, 9]])
    ]
    assert gone == [[], [2, 3]] and len(predicted) == 4


def test_what_a_store_predicts_is_counted_by_model() -> None:
    """For a pod without events."""
    store = LocalStore()
    for number in range(2):
        asked = prompt(10 * BLOCK, salt=1000 * number)
        store.confirm(store.predict("a", asked, ttl_s=60, capacity_blocks=16), float(number))
    (evicted,) = store.evicted.values()
    assert evicted.listed() == 4
    store.forget("a")
    assert evicted.listed() == 4
