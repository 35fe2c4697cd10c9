"""Which pods hold which blocks, according to the events that engines publish.

Combines each pod's own blocks (`holder_blocks.py`) with one table of all pods (`masks.py`), in which prompts are looked
up. This file does not handle sequence numbers or sockets.
"""

from __future__ import annotations

import secrets
from collections import defaultdict, deque
from collections.abc import Sequence, Set

from router.hashing import generation_seed, hash_blocks, hashes_ahead, token_array
from router.index.cluster import ClusterIndex
from router.index.evicted import EvictedBlocks
from router.index.hit_probe import CacheHabits, described
from router.index.holder_blocks import HolderBlocks
from router.index.holders import KnownHolder
from router.index.layers import HitRule
from router.index.masks import HolderMasks
from router.types import BlockChange, BlocksByTier, BlocksCleared, Generation, KvEvent, PodId, PromptPrefix


class PodCache:
    """One epoch of a pod's cache: what its events announce here, what its publisher writes to the cluster index, if
    there is one, and what a test of its hits has shown. `masks` have the blocks of all pods."""

    def __init__(
        self, pod: PodId, generation: Generation, masks: HolderMasks, index: ClusterIndex | None = None
    ) -> None:
        self.pod = pod
        self.generation = generation
        self.blocks = HolderBlocks(generation)
        self.tested: tuple[CacheHabits | None, ...] = ()
        """What a test has shown, after it; None where no known rule explained the hits."""
        self._masks = masks
        self._index = index

    @property
    def published(self) -> KnownHolder | None:
        """What the cluster index knows of the pod."""
        return self._index.holders.publisher_of(self.pod) if self._index is not None else None

    @property
    def rule(self) -> HitRule | None:
        """What a hit needs; None where the pod's layers need every block."""
        if self.blocks.rule is not None or self._index is None or (known := self.published) is None:
            return self.blocks.rule
        return self._index.holders.rule(known)

    @property
    def announced_rule(self) -> HitRule | None:
        """What a hit needs according to events alone; None before the first."""
        known = self.published
        return self.blocks.announced_rule or (known.announced_rule if known else None)

    @property
    def ahead_tokens(self) -> int:
        """How many tokens behind a block its hash includes."""
        if self.blocks.ahead_tokens or self._index is None or (known := self.published) is None:
            return self.blocks.ahead_tokens
        return known.facts.ahead_tokens

    @property
    def size_blocks(self) -> int:
        """Blocks in memory that the pod has announced."""
        known = self.published
        return self.blocks.size_blocks + (self._index.masks.held(known.name) if known and self._index else 0)

    @property
    def hits(self) -> str:
        """Which layers decide what hits, such as "full + window 128"; "" for an unknown pod."""
        return described(self.rule or self.announced_rule, *self.tested) if self.pod else ""

    def full_and_hit(self, prefix: PromptPrefix) -> tuple[int, int]:
        """Leading blocks of `prefix` that full attention has announced, and those that hit."""
        tokens = len(prefix.tokens), prefix.block_size_tokens
        hashes = hashes_ahead(prefix, prefix.hashes, self.blocks.ahead_tokens)
        own = self._masks.full_and_hit(self.pod, hashes, tokens)
        if self._index is None or (known := self.published) is None:
            return own
        hashes = hashes_ahead(prefix, prefix.hashes, known.facts.ahead_tokens)
        return max(own, self._index.masks.full_and_hit(known.name, hashes, tokens))

    def full_and_hit_tokens(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The same in tokens, of a prompt for the model's own weights."""
        array, block = token_array(tokens), self.generation.block_size_tokens
        hashes = hash_blocks(array, block, generation_seed(self.generation))
        full, hit = self.full_and_hit(PromptPrefix(self.generation, array, hashes))
        return full * block, hit * block


class BlockMap:
    """The blocks of all pods. Apply events in order, then match prompts. `index`: where pods may be published, too."""

    def __init__(self, index: ClusterIndex | None = None) -> None:
        self._masks = HolderMasks(scatter=secrets.randbits(64))
        self._index = index
        self.evicted = index.evicted if index is not None else defaultdict[str, EvictedBlocks](EvictedBlocks)
        """By model, how often evicted blocks are requested again."""
        self._caches: dict[PodId, PodCache] = {}
        self._unknown = PodCache("", Generation(model=""), self._masks)
        self._removed: deque[HolderBlocks] = deque()
        """Removed holders; each event and each lookup frees one more shard of the first."""
        self.ruled: set[PodId] = set()
        """Pods whose hits do not end with the first missing block."""
        self._ahead_tokens: dict[PodId, int] = {}
        """How many tokens behind a block the hashes of a pod include, if any."""
        self.aheads: Set[int] = frozenset()
        """All of these numbers."""
        self.unnamed: set[PodId] = set()
        """Pods whose layers all have windows or states: their events do not say which blocks they have."""

    def cache_of(self, pod: PodId) -> PodCache:
        """The pod's cache; an empty one for an unknown pod."""
        return self._caches.get(pod, self._unknown)

    @property
    def block_holders(self) -> int:
        """Triples of (block, holder, tier) in the map."""
        return self._masks.block_holders

    def add_holder(self, pod: PodId, generation: Generation) -> None:
        """Start a new, empty epoch of `pod`'s cache."""
        self.forget(pod)
        self._caches[pod] = PodCache(pod, generation, self._masks, self._index)

    def forget(self, pod: PodId) -> None:
        """Drop all blocks of `pod`. O(1): their memory is freed later, shard by shard."""
        cache = self._caches.pop(pod, None)
        if cache is not None:
            self._masks.forget(pod)
            self.ruled.discard(pod)
            self.unnamed.discard(pod)
            if self._ahead_tokens.pop(pod, 0):
                self.aheads = frozenset(self._ahead_tokens.values())
            self.evicted[cache.generation.model].holds(pod, 0)
            self._removed.append(cache.blocks)

    def learn(self, pod: PodId, habits: CacheHabits | None) -> None:
        """A test has shown this of the pod's cache; None: no known rule explains its hits."""
        cache = self._caches.get(pod)
        if cache is None:
            return
        cache.tested = (habits,)
        if habits is not None:
            before = cache.blocks.rule
            cache.blocks.learn(habits)
            self._follow(cache, before)
            if self._index is not None:
                self._index.learn(pod, habits)

    def apply(self, pod: PodId, event: KvEvent) -> Sequence[BlockChange]:
        """Apply one event, and return what it changes; events of unknown pods are ignored."""
        self._free_next_shard()
        cache = self._caches.get(pod)
        if cache is None:
            return ()
        if isinstance(event, BlocksCleared):
            self.add_holder(pod, cache.generation)
            for habits in cache.tested:
                self.learn(pod, habits)
            return ()
        rule, changes = cache.blocks.rule, cache.blocks.apply(event)
        self._follow(cache, rule)
        for change in changes:
            self._masks.apply(pod, change)
            if not change.held and not change.layer:
                self.evicted[cache.generation.model].evicted(pod, change, self._masks.held(pod))
        return changes

    def _follow(self, cache: PodCache, before: HitRule | None) -> None:
        pod, rule = cache.pod, cache.blocks.rule
        if cache.blocks.ahead_tokens != self._ahead_tokens.get(pod, 0):
            self._ahead_tokens[pod] = cache.blocks.ahead_tokens
            self.aheads = frozenset(self._ahead_tokens.values())
        if rule is None or rule is before:
            return
        if not rule.has_full:
            self.unnamed.add(pod)
            return
        self.unnamed.discard(pod)
        self._masks.follow(pod, rule)
        self.ruled.add(pod)

    def match(self, prefix: PromptPrefix) -> dict[PodId, BlocksByTier]:
        """Leading blocks of `prefix` by pod and tier."""
        self._free_next_shard()
        tokens = len(prefix.tokens), prefix.block_size_tokens
        found = self._masks.walk(prefix.hashes, tokens)
        for ahead in self.aheads:
            found |= self._masks.walk(hashes_ahead(prefix, prefix.hashes, ahead), tokens)
        return found

    def _free_next_shard(self) -> None:
        if self._removed and self._removed[0].free_next_shard():
            self._removed.popleft()
