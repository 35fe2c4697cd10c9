"""How is the index kept in this process alone?

Joins what engines announce with what this router has just sent. Needs nothing but memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.index.blockmap import BlockMap
from router.index.predicted import PredictedIndex
from router.types import Generation, KvEvent, PodId, PrefixMatch, PromptPrefix


class LocalStore:
    """The embedded `PrefixStore`."""

    def __init__(self) -> None:
        self._announced = BlockMap()
        self._predicted = PredictedIndex()

    @property
    def block_holders(self) -> int:
        """Announced (block, holder) pairs."""
        return self._announced.block_holders

    def add_holder(self, pod: PodId, generation: Generation) -> None:
        self._announced.add_holder(pod, generation)
        self._predicted.forget(pod)

    def forget(self, pod: PodId) -> None:
        self._announced.forget(pod)
        self._predicted.forget(pod)

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        for event in events:
            self._announced.apply(pod, event)

    def record(
        self, pod: PodId, prefix: PromptPrefix, now_s: float, *, ttl_s: float, capacity_blocks: int | None
    ) -> None:
        self._predicted.record(pod, prefix.hashes, now_s, ttl_s=ttl_s, capacity_blocks=capacity_blocks)

    def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        """By pod the longer of what it announced and what was sent to it."""
        blocks = self._announced.match(prefix)
        for pod, predicted in self._predicted.match(prefix.hashes, now_s).items():
            if sum(predicted) > sum(blocks.get(pod, (0,))):
                blocks[pod] = predicted
        return PrefixMatch(blocks)

    def known_blocks(self, pod: PodId, prefix: PromptPrefix) -> int:
        return sum(self._announced.match(prefix).get(pod, (0,)))

    def refused(self, pod: PodId) -> str:
        return self._announced.refused(pod)
