"""Where will hits be able to end on a pod that is computing a prompt, if its windows and states keep checkpoints?

Covers the time from a dispatch to the engine's events. A checkpoint is identified by the block in front of it, whose
chain hash identifies the whole prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from router.types import BlockHash, BlocksByTier, PodId


class Checkpoints:
    """The checkpoints that pods have not announced. Every `begin` is followed by one `withdraw`."""

    def __init__(self) -> None:
        self._pods: dict[BlockHash, set[PodId]] = {}
        """By block, the pods that will have a checkpoint behind it."""
        self._prompts = Counter[tuple[PodId, BlockHash]]()
        """The number of prompts that keep it, announced or not."""

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._prompts[pod, block] += 1
            self._pods.setdefault(block, set()).add(pod)

    def announced(self, pod: PodId, blocks: Iterable[BlockHash]) -> None:
        """The pod has kept these blocks. From now on its events alone count: it may evict them at any time."""
        for block in blocks:
            if others := self._pods.pop(block, set()) - {pod}:
                self._pods[block] = others

    def withdraw(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._prompts[pod, block] -= 1
            if not self._prompts[pod, block]:
                del self._prompts[pod, block]
                self.announced(pod, [block])

    def match(self, hashes: Sequence[BlockHash]) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, up to the last checkpoint in the prompt. O(blocks) while there are any."""
        found: dict[PodId, BlocksByTier] = {}
        if not self._pods:
            return found
        for depth, pods in enumerate(map(self._pods.get, hashes), start=1):
            if pods:
                found.update(dict.fromkeys(pods, (depth, 0, 0, 0)))
        return found
