"""Where will hits be able to end on a pod that is computing a prompt, if its windows and states keep checkpoints?

Covers the time from a dispatch to the engine's events. A checkpoint is identified by the block in front of it, whose
chain hash identifies the whole prefix. Methods take the time, which must not go backwards.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from router.types import BlockHash, BlocksByTier, PodId

UNTIL_EVENTS_S = 3.0
"""Events of a prompt arrive before its first token, through Redis within a second. If they do not name a checkpoint
until then, the pod has not kept it."""


class Checkpoints:
    """The checkpoints that pods have not announced. Every `begin` is followed by one `confirm` or `withdraw`."""

    def __init__(self) -> None:
        self._pods: dict[BlockHash, set[PodId]] = {}
        """By block, the pods that will have a checkpoint behind it."""
        self._prompts = Counter[tuple[PodId, BlockHash]]()
        """The number of prompts that keep it, announced or not."""
        self._computed: deque[tuple[float, PodId, Sequence[BlockHash]]] = deque()
        """The computed prompts: until when they count, and what they keep."""

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

    def confirm(self, pod: PodId, ends: Sequence[BlockHash], now_s: float) -> None:
        """The prompt is computed."""
        if ends:
            self._computed.append((now_s + UNTIL_EVENTS_S, pod, ends))

    def withdraw(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._prompts[pod, block] -= 1
            if not self._prompts[pod, block]:
                del self._prompts[pod, block]
                self.announced(pod, [block])

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, up to the last checkpoint in the prompt. O(blocks) while there are any."""
        while self._computed and self._computed[0][0] <= now_s:
            self.withdraw(*self._computed.popleft()[1:])
        found: dict[PodId, BlocksByTier] = {}
        if not self._pods:
            return found
        for depth, pods in enumerate(map(self._pods.get, hashes), start=1):
            if pods:
                found.update(dict.fromkeys(pods, (depth, 0, 0, 0)))
        return found

    def forget(self, pod: PodId) -> None:
        """Drop what counts for computed prompts."""
        for _, _, ends in [one for one in self._computed if one[1] == pod]:
            self.withdraw(pod, ends)
        self._computed = deque([one for one in self._computed if one[1] != pod])
