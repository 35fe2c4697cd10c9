"""The prefix stores: which pods hold which blocks of a prompt.

`LocalStore` combines what engines announce to this router with what the router has just sent. `ReplicaStore` adds the
cluster index, copied into memory by `feeds/kv_redis.py`. A match never fails and never waits for Redis; if its data is
stale, it sets `degraded`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Protocol

from router.hashing import generation_seed, hash_blocks, hashes_ahead, token_array
from router.index.blockmap import BlockMap
from router.index.cluster import ClusterIndex
from router.index.evicted import EvictedByModel
from router.index.hit_probe import CacheHabits
from router.index.layers import HitRule, kept_ends
from router.index.predicted import PredictedIndex, Prediction
from router.types import (
    BlockChange,
    BlockHash,
    BlocksByTier,
    Generation,
    KvEvent,
    Pod,
    PodId,
    PrefixMatch,
    PromptPrefix,
    Tier,
)


class EventStore(Protocol):
    """Receives the KV events of pods: a router's store, or a publisher."""

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        """Start a new, empty epoch of `pod`'s cache. Its events are hashed under `generation`."""

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Apply events of `pod` in order."""

    def size_blocks(self, pod: PodId) -> int:
        """Blocks in memory that `pod` has announced."""

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """All past events of `pod` are delivered; `complete` is False if some are lost for good."""


class LocalStore:
    """Which pods hold which blocks, in memory: announced and predicted blocks of this router. An `EventStore`."""

    def __init__(self, evicted: EvictedByModel | None = None) -> None:
        self.evicted = evicted or EvictedByModel()
        """How often evicted blocks are requested again."""
        self._announced = BlockMap(self.evicted)
        self.unnamed = self._announced.unnamed
        """Pods whose events do not say which blocks they have: they are predicted as those without events."""
        self._generations: dict[PodId, Generation] = {}
        self.predicted = PredictedIndex()
        self.predicted.on_evict = self._on_evict
        self._models: dict[PodId, str] = {}
        """By pod, the model of its last dispatch."""

    @property
    def ruled(self) -> Collection[PodId]:
        """Pods whose layers do not all need every block."""
        return self._announced.ruled

    def announced_rule(self, pod: PodId) -> HitRule | None:
        """What a hit on `pod` needs according to its events alone; None before the first."""
        return self._announced.announced_rule(pod)

    def learn(self, pod: PodId, habits: CacheHabits | None) -> None:
        """A test has shown this of the pod's cache; None: no known rule explains its hits."""
        self._announced.learn(pod, habits)

    def rule(self, pod: PodId) -> HitRule | None:
        """What a hit on `pod` needs; None where its layers need every block."""
        return self._announced.rule(pod)

    def full_and_hit(self, pod: PodId, prefix: PromptPrefix) -> tuple[int, int]:
        """Leading blocks of `prefix` that full attention of `pod` has announced, and those that hit."""
        return self._announced.full_and_hit(pod, prefix)

    def full_and_hit_tokens(self, pod: PodId, tokens: Sequence[int]) -> tuple[int, int]:
        """The same in tokens, of a prompt for the model's own weights. Nothing of an unknown pod."""
        if (generation := self._generations.get(pod)) is None:
            return 0, 0
        array, block = token_array(tokens), generation.block_size_tokens
        hashes = hash_blocks(array, block, generation_seed(generation))
        full, hit = self.full_and_hit(pod, PromptPrefix(generation, array, hashes))
        return full * block, hit * block

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory."""
        return self._announced.block_holders

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        self._announced.add_holder(pod.id, generation)
        self._generations[pod.id] = generation
        self.predicted.forget(pod.id)

    def forget(self, pod: PodId) -> None:
        self._announced.forget(pod)
        self._generations.pop(pod, None)
        self.predicted.forget(pod)
        if model := self._models.pop(pod, ""):
            self.evicted.of(model).holds(pod, 0)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        for event in events:
            for change in self._announced.apply(pod, event):
                self.predicted.apply(pod, change)

    def size_blocks(self, pod: PodId) -> int:
        return self._announced.size_blocks(pod)

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """Ignored: a match does not depend on it."""

    def predict(self, pod: PodId, prefix: PromptPrefix, *, ttl_s: float, capacity_blocks: int | None) -> Prediction:
        """Count a prompt that is being sent to `pod` as cached there, until `confirm` or `withdraw`."""
        self._models[pod] = prefix.generation.model
        ahead_tokens = self._ahead_tokens(pod)
        hashes = hashes_ahead(prefix, prefix.hashes, ahead_tokens) if ahead_tokens else prefix.hashes
        ends = self._kept_ends(pod, prefix, hashes) if pod in self.ruled else ()
        return self.predicted.begin(pod, hashes, ttl_s=ttl_s, capacity_blocks=capacity_blocks, ends=ends)

    def _ahead_tokens(self, pod: PodId) -> int:
        """How many tokens behind a block the hashes of `pod` include."""
        return self._announced.ahead_tokens.get(pod, 0)

    @property
    def _aheads(self) -> Set[int]:
        return self._announced.aheads

    def _kept_ends(self, pod: PodId, prefix: PromptPrefix, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The blocks after which hits can end on a pod with windows or states once it has computed the prompt, but for
        those that it has announced. Its full attention has what it announces, and what it is computing."""
        rule, block_tokens = self.rule(pod), prefix.block_size_tokens
        if rule is None or not rule.keeps_checkpoints:
            return ()
        full, hit = self.full_and_hit(pod, prefix)
        full = max(full, self.predicted.computing(pod, hashes))
        ends = (end // block_tokens for end in kept_ends(rule, full * block_tokens, prefix.token_count))
        return [hashes[end - 1] for end in ends if hit < end <= len(hashes)]

    def confirm(self, prediction: Prediction, now_s: float) -> None:
        """The pod has computed the prompt: it counts as cached for `ttl_s`."""
        self.predicted.confirm(prediction, now_s)

    def withdraw(self, prediction: Prediction) -> None:
        self.predicted.withdraw(prediction)

    def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        """Leading blocks of `prefix` by pod. Does not raise."""
        return PrefixMatch(self.blocks(prefix, now_s))

    def blocks(
        self, prefix: PromptPrefix, now_s: float, known: Mapping[PodId, BlocksByTier] | None = None
    ) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod: the maximum of announced, predicted and `known` blocks."""
        announced, predicted = self._announced.match(prefix), self._predicted(prefix, now_s)
        if not announced and not known:
            return predicted
        blocks = dict(known or announced)
        for more in (announced, predicted) if known else (predicted,):
            for pod, found in more.items():
                if sum(found) > sum(blocks.get(pod, (0,))):
                    blocks[pod] = found
        return blocks

    def _predicted(self, prefix: PromptPrefix, now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks of prompts that pods are computing: one with windows or states keeps only checkpoints."""
        predicted, ruled = self.predicted.match(prefix.hashes, now_s), self.ruled
        aheads = [hashes_ahead(prefix, prefix.hashes, ahead) for ahead in self._aheads]
        for hashes in aheads:
            predicted |= self.predicted.match(hashes, now_s)
        if not ruled:
            return predicted
        usable = prefix.hashes[: max(prefix.token_count - 1, 0) // prefix.block_size_tokens]
        kept = self.predicted.checkpoints.match(usable)
        for hashes in aheads:  # none of them ends with the prompt
            kept |= self.predicted.checkpoints.match(hashes)
        for pod in ruled & predicted.keys() if predicted else ():
            rule, depth = self.rule(pod), sum(predicted.pop(pod))
            if rule is not None and not rule.keeps_checkpoints:
                depth = min(depth, len(usable)) if rule.is_single else depth
                predicted[pod] = (max(depth - rule.dropped_tokens // prefix.block_size_tokens, 0), 0, 0, 0)
        return predicted | kept

    def _on_evict(self, pod: PodId, blocks: array[int], held: int) -> None:
        """The model of a pod's cache, which it does not publish, is full."""
        if model := self._models.get(pod):
            self.evicted.of(model).evicted(pod, BlockChange(Tier.GPU, False, blocks), held)

    def is_published(self, pod: PodId, now_s: float) -> bool:
        return False

    def hits(self, pod: PodId) -> str:
        """Which layers decide what hits on `pod`, such as "full + window 128"; "" where its cache is unknown."""
        return self._announced.hits(pod, self.rule(pod) or self.announced_rule(pod))

    def rejected_reason(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""
        return self._announced.rejected_reason(pod)


FRESH_S = 3.0
"""Maximum age of an up-to-date replica; the log is read at least once a second."""


class ReplicaStore(LocalStore):
    """A `LocalStore` with a replica of the cluster index, which is used up to an age of `max_age_s`."""

    def __init__(self, index: ClusterIndex, *, max_age_s: float) -> None:
        super().__init__(index.evicted)
        self.index = index
        index.on_change = self.predicted.apply
        self._max_age_s = max_age_s
        self._current_s: float | None = None
        self._stale = False

    @property
    def block_holders(self) -> int:
        return self.index.masks.block_holders + super().block_holders

    def mark_current(self, now_s: float) -> None:
        self._current_s = now_s
        self._stale = False

    def mark_stale(self) -> None:
        """Redis does not answer: matches are degraded."""
        self._stale = True

    def age_s(self, now_s: float) -> float:
        """Time since the replica was up to date; infinite before the first time."""
        return float("inf") if self._current_s is None else max(now_s - self._current_s, 0.0)

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        super().add_holder(pod, generation)
        self.index.holders.bind(pod, generation)

    def forget(self, pod: PodId) -> None:
        super().forget(pod)
        self.index.holders.unbind(pod)

    def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        age_s = self.age_s(now_s)
        known = self.index.match(prefix) if age_s <= self._max_age_s else {}
        return PrefixMatch(self.blocks(prefix, now_s, known), degraded=self._stale or age_s > FRESH_S)

    def _ahead_tokens(self, pod: PodId) -> int:
        known = self.index.holders.publisher_of(pod)
        return super()._ahead_tokens(pod) or (known.facts.ahead_tokens if known else 0)

    @property
    def _aheads(self) -> Set[int]:
        return super()._aheads | self.index.holders.aheads

    @property
    def ruled(self) -> Collection[PodId]:
        own, published = self._announced.ruled, self.index.holders.ruled
        return own | published if own and published else own or published

    def rule(self, pod: PodId) -> HitRule | None:
        known = self.index.holders.publisher_of(pod)
        return super().rule(pod) or (self.index.holders.rule(known) if known else None)

    def announced_rule(self, pod: PodId) -> HitRule | None:
        known = self.index.holders.publisher_of(pod)
        return super().announced_rule(pod) or (known.announced_rule if known else None)

    def learn(self, pod: PodId, habits: CacheHabits | None) -> None:
        super().learn(pod, habits)
        if habits is not None:
            self.index.learn(pod, habits)

    def full_and_hit(self, pod: PodId, prefix: PromptPrefix) -> tuple[int, int]:
        own, known = super().full_and_hit(pod, prefix), self.index.holders.publisher_of(pod)
        if known is None:
            return own
        hashes, tokens = hashes_ahead(prefix, prefix.hashes, known.facts.ahead_tokens), len(prefix.tokens)
        return max(own, self.index.masks.full_and_hit(known.name, hashes, (tokens, prefix.block_size_tokens)))

    def size_blocks(self, pod: PodId) -> int:
        known = self.index.holders.publisher_of(pod)
        return super().size_blocks(pod) + (self.index.masks.held(known.name) if known else 0)

    def is_published(self, pod: PodId, now_s: float) -> bool:
        fresh = not self._stale and self.age_s(now_s) <= FRESH_S
        return fresh and self.index.holders.publisher_of(pod) is not None
