"""The prefix stores: who holds which blocks of a prompt, behind one protocol.

`LocalStore` combines what engines announce to this router with what the router has just sent. `ReplicaStore` adds the
cluster index, copied into memory by `feeds/kv_redis.py`. A match never fails and never waits for Redis: a store that
cannot answer fully sets `degraded`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from router.index.blockmap import BlockMap
from router.index.cluster import ClusterIndex
from router.index.predicted import PredictedIndex
from router.types import BlockHash, BlocksByTier, Generation, KvEvent, Pod, PodId, PrefixMatch, PromptPrefix


class PrefixStore(Protocol):
    """Who holds which blocks."""

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        """Begin a (new) life of `pod`'s cache, empty as far as this router heard itself. Its events are hashed under
        `generation`."""

    def forget(self, pod: PodId) -> None:
        """The pod is gone, with everything it had."""

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Take over what `pod` announced to this router, in order."""

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """All that `pod` had announced before was told, or is lost for good."""

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        """`prefix` was just dispatched to `pod`: it counts as held there for `ttl_s`."""

    async def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        """Who holds how much of `prefix`. Never raises, and never waits longer than the store's deadline."""

    async def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        """Leading blocks that `pod` itself has announced, predictions aside."""

    def is_published(self, pod: PodId) -> bool:
        """Does anybody publish what this pod holds, other than to this router alone?"""

    def rejected_reason(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory."""


Dispatched: TypeAlias = Callable[[PodId, Sequence[BlockHash], float, int | None], None]
"""(pod, blocks, ttl_s, capacity_blocks)."""


class LocalStore:
    """The embedded `PrefixStore`."""

    def __init__(self) -> None:
        self._announced = BlockMap()
        self._predicted = PredictedIndex()
        self.on_record: Dispatched | None = None
        """Called with each dispatch that this worker records."""

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples."""
        return self._announced.block_holders

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        self._announced.add_holder(pod.id, generation)
        self._predicted.forget(pod.id)

    def forget(self, pod: PodId) -> None:
        self._announced.forget(pod)
        self._predicted.forget(pod)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        for event in events:
            self._announced.apply(pod, event)

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """Nothing follows from it here."""

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        self._predicted.record(pod, prefix.hashes, now_s, ttl_s=ttl_s, capacity_blocks=capacity_blocks)
        if self.on_record is not None:
            self.on_record(pod, prefix.hashes, ttl_s, capacity_blocks)

    def apply_remote(
        self, pod: PodId, blocks: Sequence[BlockHash], now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        """Record a dispatch of another worker; does not call `on_record`."""
        self._predicted.record(pod, blocks, now_s, ttl_s=ttl_s, capacity_blocks=capacity_blocks)

    async def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        return PrefixMatch(self.blocks(prefix, now_s))

    def blocks(
        self, prefix: PromptPrefix, now_s: float, known: Mapping[PodId, BlocksByTier] | None = None
    ) -> dict[PodId, BlocksByTier]:
        """By pod the longest of what it announced, what was sent to it, and what is `known` otherwise."""
        announced, predicted = self._announced.match(prefix), self._predicted.match(prefix.hashes, now_s)
        if not announced and not known:
            return predicted
        blocks = dict(known or {})
        for more in (announced, predicted):
            for pod, found in more.items():
                if sum(found) > sum(blocks.get(pod, (0,))):
                    blocks[pod] = found
        return blocks

    async def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        return self.announced_blocks(pod, prefix)

    def announced_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        """Leading blocks that `pod` has announced to this router."""
        return sum(self._announced.match(prefix).get(pod, (0,)))

    def is_published(self, pod: PodId) -> bool:
        return False

    def rejected_reason(self, pod: PodId) -> str:
        return self._announced.rejected_reason(pod)


FRESH_S = 3.0
"""A copy that was in contact this lately is up to date: the log is asked again after a second at the latest."""


class ReplicaStore:
    """A `PrefixStore` over a local one. `max_age_s` bounds how old a copy may be that is still served."""

    def __init__(self, index: ClusterIndex, local: LocalStore, *, max_age_s: float) -> None:
        self.index = index
        self._local = local
        self._max_age_s = max_age_s
        self._contact_s: float | None = None
        self._lost = False

    @property
    def block_holders(self) -> int:
        """Announced (block, holder, tier) triples in memory."""
        return self.index.block_holders + self._local.block_holders

    def contact(self, now_s: float) -> None:
        """The copy is as new as it can be."""
        self._contact_s = now_s
        self._lost = False

    def lost(self) -> None:
        """News comes no longer: from now on, the copy is an old one."""
        self._lost = True

    def age_s(self, now_s: float) -> float:
        """How long ago the copy was up to date; infinite before it was for the first time."""
        return float("inf") if self._contact_s is None else max(now_s - self._contact_s, 0.0)

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        self._local.add_holder(pod, generation)
        self.index.holders.bind(pod, generation)

    def forget(self, pod: PodId) -> None:
        self._local.forget(pod)
        self.index.holders.unbind(pod)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        self._local.apply(pod, events)

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        self._local.caught_up(pod, complete=complete)

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        self._local.record(pod, prefix, now_s, ttl_s=ttl_s, capacity_blocks=capacity_blocks)

    async def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        age_s = self.age_s(now_s)
        known = self.index.match(prefix) if age_s <= self._max_age_s else {}
        return PrefixMatch(self._local.blocks(prefix, now_s, known), age_s, degraded=self._lost or age_s > FRESH_S)

    async def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        announced = sum(self.index.match(prefix).get(pod, (0,)))
        return max(announced, self._local.announced_blocks(pod, prefix))

    def is_published(self, pod: PodId) -> bool:
        """While news comes in at all: of a copy that grows old, nobody confirms anything."""
        fresh = not self._lost and self.age_s(time.monotonic()) <= FRESH_S
        return fresh and self.index.holders.publisher_of(pod) is not None

    def rejected_reason(self, pod: PodId) -> str:
        return self._local.rejected_reason(pod)
