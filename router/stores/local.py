"""How is the index kept in this process alone?

Joins what engines announce to this router with what this router has just sent. Needs nothing but memory; the stores
that know more ask this one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from router.index.blockmap import BlockMap
from router.index.predicted import PredictedIndex
from router.types import BlockHash, BlocksByTier, Generation, KvEvent, Pod, PodId, PrefixMatch, PromptPrefix

Dispatched: TypeAlias = Callable[[PodId, Sequence[BlockHash], float, int | None], None]
"""(pod, blocks, ttl_s, capacity_blocks)."""


class LocalStore:
    """The embedded `PrefixStore`."""

    def __init__(self) -> None:
        self._announced = BlockMap()
        self._predicted = PredictedIndex()
        self.told: Dispatched | None = None
        """Hears of everything that is recorded here."""

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
        if self.told is not None:
            self.told(pod, prefix.hashes, ttl_s, capacity_blocks)

    def hear(
        self, pod: PodId, blocks: Sequence[BlockHash], now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        """Another worker of this router has recorded this."""
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

    def announces(self, pod: PodId) -> bool:
        return False

    def refused(self, pod: PodId) -> str:
        return self._announced.refused(pod)
