"""The prefix stores: which pods hold which blocks of a prompt.

`LocalStore` combines what engines announce to this router with what the router has just sent. `ReplicaStore` adds the
cluster index, copied into memory by `feeds/kv_redis.py`. A match never fails or waits; with old data it is `degraded`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Protocol

from router.hashing import hashes_ahead
from router.index.blockmap import BlockMap, PodCache
from router.index.cluster import ClusterIndex, LogEntry
from router.index.hit_probe import CacheHabits
from router.index.layers import kept_ends
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

    def __init__(self, index: ClusterIndex | None = None) -> None:
        self._announced = BlockMap(index)
        self.evicted = self._announced.evicted
        """By model, how often evicted blocks are requested again."""
        self.unnamed = self._announced.unnamed
        """Pods whose events do not say which blocks they have: they are predicted as those without events."""
        self.predicted = PredictedIndex()
        self._models: dict[PodId, str] = {}
        """By pod, the model of its last dispatch."""

    @property
    def ruled(self) -> Collection[PodId]:
        """Pods with a `HitRule`: not all of their layers need every block of a hit."""
        return self._announced.ruled

    def cache_of(self, pod: PodId) -> PodCache:
        """What is known of the pod's cache; nothing of an unknown pod."""
        return self._announced.cache_of(pod)

    def learn(self, pod: PodId, habits: CacheHabits | None) -> None:
        """A test has shown this of the pod's cache; None: no known rule explains its hits."""
        self._announced.learn(pod, habits)

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory."""
        return self._announced.block_holders

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        self._announced.add_holder(pod.id, generation)
        self.predicted.forget(pod.id)

    def forget(self, pod: PodId) -> None:
        self._announced.forget(pod)
        self.predicted.forget(pod)
        if model := self._models.pop(pod, ""):
            self.evicted[model].holds(pod, 0)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        for event in events:
            for change in self._announced.apply(pod, event):
                self.predicted.apply(pod, change)

    def size_blocks(self, pod: PodId) -> int:
        return self.cache_of(pod).size_blocks

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """Ignored: a match does not depend on it."""

    def predict(self, pod: PodId, prefix: PromptPrefix, *, ttl_s: float, capacity_blocks: int | None) -> Prediction:
        """Count a prompt that is being sent to `pod` as cached there, until `confirm` or `withdraw`."""
        self._models[pod] = prefix.generation.model
        ahead_tokens = self.cache_of(pod).ahead_tokens
        hashes = hashes_ahead(prefix, prefix.hashes, ahead_tokens) if ahead_tokens else prefix.hashes
        ends = self._kept_ends(pod, prefix, hashes) if pod in self.ruled else ()
        return self.predicted.begin(pod, hashes, ttl_s=ttl_s, capacity_blocks=capacity_blocks, ends=ends)

    @property
    def _aheads(self) -> Set[int]:
        return self._announced.aheads

    def _kept_ends(self, pod: PodId, prefix: PromptPrefix, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The blocks after which hits can end once a pod with windows or states has computed the prompt, without those
        that it has announced. Its full attention holds what it has announced and what it is computing."""
        cache, block_tokens = self.cache_of(pod), prefix.block_size_tokens
        rule = cache.rule
        if rule is None or not rule.keeps_checkpoints:
            return ()
        full, hit = cache.full_and_hit(prefix)
        full = max(full, self.predicted.computing(pod, hashes))
        ends = (end // block_tokens for end in kept_ends(rule, full * block_tokens, prefix.token_count))
        return [hashes[end - 1] for end in ends if hit < end <= len(hashes)]

    def confirm(self, prediction: Prediction, now_s: float) -> None:
        """The pod has computed the prompt: it counts as cached for `ttl_s`."""
        pod = prediction.pod
        if evicted := self.predicted.confirm(prediction, now_s):  # the cache, which it does not publish, is full
            change = BlockChange(Tier.GPU, False, evicted)
            self.evicted[self._models[pod]].evicted(pod, change, prediction.capacity_blocks or 0)

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
            rule, depth = self.cache_of(pod).rule, sum(predicted.pop(pod))
            if rule is not None and not rule.keeps_checkpoints:
                depth = min(depth, len(usable)) if rule.is_single else depth
                predicted[pod] = (max(depth - rule.dropped_tokens // prefix.block_size_tokens, 0), 0, 0, 0)
        return predicted | kept

    def is_published(self, pod: PodId, now_s: float) -> bool:
        return False


FRESH_S = 3.0
"""Maximum age of an up-to-date replica; the log is read at least once a second."""


class ReplicaStore(LocalStore):
    """A `LocalStore` with a replica of the cluster index, which is used up to an age of `max_age_s`."""

    def __init__(self, index: ClusterIndex, *, max_age_s: float) -> None:
        super().__init__(index)
        self.index = index
        self._max_age_s = max_age_s
        self._current_s: float | None = None
        self._stale = False

    @property
    def block_holders(self) -> int:
        return self.index.masks.block_holders + super().block_holders

    def apply_entry(self, generation: Generation, entry: LogEntry, now_s: float) -> bool:
        """Apply the next entry of a generation's log; what pods announce in it confirms predictions. False if the
        holder must be read again."""
        return self.index.apply(generation, entry, now_s, self.predicted.apply)

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

    @property
    def _aheads(self) -> Set[int]:
        return super()._aheads | self.index.holders.aheads

    @property
    def ruled(self) -> Collection[PodId]:
        own, published = self._announced.ruled, self.index.holders.ruled
        return own | published if own and published else own or published

    def is_published(self, pod: PodId, now_s: float) -> bool:
        fresh = not self._stale and self.age_s(now_s) <= FRESH_S
        return fresh and self.index.holders.publisher_of(pod) is not None
