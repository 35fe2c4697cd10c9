"""Which pods hold which blocks, according to the events that engines publish.

Combines each pod's own blocks (`holder_blocks.py`) with one table of all pods (`masks.py`), in which prompts are looked
up. This file does not handle sequence numbers or sockets.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence, Set

from router.hashing import hashes_ahead
from router.index.evicted import EvictedByModel
from router.index.hit_probe import CacheHabits, described
from router.index.holder_blocks import HolderBlocks
from router.index.layers import HitRule
from router.index.masks import HolderMasks
from router.types import BlockChange, BlocksByTier, BlocksCleared, Generation, KvEvent, PodId, PromptPrefix


class BlockMap:
    """The blocks of all pods. Apply events in order, then match prompts."""

    def __init__(self, evicted: EvictedByModel | None = None) -> None:
        self._evicted = evicted or EvictedByModel()
        self._masks = HolderMasks(scatter=secrets.randbits(64))
        self._holders: dict[PodId, HolderBlocks] = {}
        self._removed: deque[HolderBlocks] = deque()
        """Removed holders; each event and each lookup frees one more shard of the first."""
        self.ruled: set[PodId] = set()
        """Pods whose hits do not end with the first missing block."""
        self._tested: dict[PodId, CacheHabits | None] = {}
        """What a test has shown of a pod; None where no known rule explained its hits."""
        self.ahead_tokens: dict[PodId, int] = {}
        """How many tokens behind a block the hashes of a pod include, if any."""
        self.unnamed: set[PodId] = set()
        """Pods whose layers all have windows or states: their events do not say which blocks they have."""

    @property
    def aheads(self) -> Set[int]:
        """Numbers of tokens behind a block that hashes of some pods include."""
        return frozenset(self.ahead_tokens.values()) if self.ahead_tokens else frozenset()

    @property
    def block_holders(self) -> int:
        """Triples of (block, holder, tier) in the map."""
        return self._masks.block_holders

    def add_holder(self, pod: PodId, generation: Generation) -> None:
        """Start a new, empty epoch of `pod`'s cache."""
        self.forget(pod)
        self._holders[pod] = HolderBlocks(generation)

    def forget(self, pod: PodId) -> None:
        """Drop all blocks of `pod`. O(1): their memory is freed later, shard by shard."""
        holder = self._holders.pop(pod, None)
        if holder is not None:
            self._masks.forget(pod)
            self.ruled.discard(pod)
            self._tested.pop(pod, None)
            self.unnamed.discard(pod)
            self.ahead_tokens.pop(pod, None)
            self._evicted.of(holder.generation.model).holds(pod, 0)
            self._removed.append(holder)

    def size_blocks(self, pod: PodId) -> int:
        """Engine blocks of `pod` in the map."""
        holder = self._holders.get(pod)
        return holder.size_blocks if holder else 0

    def rejected_reason(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""
        holder = self._holders.get(pod)
        return holder.rejected_reason if holder else ""

    def hits(self, pod: PodId, rule: HitRule | None = None) -> str:
        """What decides what hits on `pod`, in words. `rule`: where it is known from elsewhere."""
        holder = self._holders.get(pod)
        if holder is None:
            return ""
        habits = (self._tested[pod],) if pod in self._tested else ()
        return described(rule or holder.rule or holder.announced_rule, *habits)

    def announced_rule(self, pod: PodId) -> HitRule | None:
        """What a hit on `pod` needs according to its events alone; None before the first."""
        holder = self._holders.get(pod)
        return holder.announced_rule if holder else None

    def learn(self, pod: PodId, habits: CacheHabits | None) -> None:
        """A test has shown this of the pod's cache; None: no known rule explains its hits."""
        self._tested[pod] = habits
        if (holder := self._holders.get(pod)) is not None and habits is not None:
            before = holder.rule
            holder.learn(habits)
            self._follow(pod, holder, before)

    def rule(self, pod: PodId) -> HitRule | None:
        """What a hit on `pod` needs; None where its layers need every block."""
        holder = self._holders.get(pod)
        return holder.rule if holder else None

    def full_and_hit(self, pod: PodId, prefix: PromptPrefix) -> tuple[int, int]:
        """Leading blocks of `prefix` that full attention of `pod` has, and those that hit."""
        hashes = hashes_ahead(prefix, prefix.hashes, self.ahead_tokens.get(pod, 0))
        return self._masks.full_and_hit(pod, hashes, (len(prefix.tokens), prefix.block_size_tokens))

    def apply(self, pod: PodId, event: KvEvent) -> Sequence[BlockChange]:
        """Apply one event, and return what it changes; events of unknown pods are ignored."""
        self._free_next_shard()
        holder = self._holders.get(pod)
        if holder is None:
            return ()
        if isinstance(event, BlocksCleared):
            tested = {pod: self._tested[pod]} if pod in self._tested else {}
            self.add_holder(pod, holder.generation)
            for habits in tested.values():
                self.learn(pod, habits)
            return ()
        rule, changes = holder.rule, holder.apply(event)
        self._follow(pod, holder, rule)
        for change in changes:
            self._masks.apply(pod, change)
            if not change.held and not change.layer:
                self._evicted.of(holder.generation.model).evicted(pod, change, self._masks.held(pod))
        return changes

    def _follow(self, pod: PodId, holder: HolderBlocks, before: HitRule | None) -> None:
        if holder.ahead_tokens:
            self.ahead_tokens[pod] = holder.ahead_tokens
        if holder.rule is None or holder.rule is before:
            return
        if not holder.rule.has_full:
            self.unnamed.add(pod)
            return
        self.unnamed.discard(pod)
        self._masks.follow(pod, holder.rule)
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
