"""Where will hits be able to end on a pod that is computing a prompt, if its windows and states keep checkpoints?

Covers the time from a dispatch to the engine's events. A checkpoint is identified by the block in front of it, whose
chain hash identifies the whole prefix. Methods take the time, which must not go backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from router.types import BlockHash, BlocksByTier, PodId

UNTIL_EVENTS_S = 3.0
"""Events of a prompt arrive before its first token, through Redis within a second. Then they alone count, or what is
assumed of the pod."""


class Checkpoints:
    """The checkpoints that pods have not announced. Every `begin` is followed by one `confirm` or `withdraw`."""

    def __init__(self) -> None:
        self._ends: dict[BlockHash, dict[PodId, int]] = {}
        """By block and pod, the number of prompts that keep a checkpoint behind it."""
        self._computed: deque[tuple[float, PodId, Sequence[BlockHash]]] = deque()
        """The computed prompts: until when they count, and what they keep."""

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def begin(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            pods = self._ends.setdefault(block, {})
            pods[pod] = pods.get(pod, 0) + 1

    def confirm(self, pod: PodId, ends: Sequence[BlockHash], now_s: float) -> None:
        """The prompt is computed."""
        if ends:
            self._computed.append((now_s + UNTIL_EVENTS_S, pod, ends))

    def withdraw(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            pods = self._ends[block]
            pods[pod] -= 1
            if not pods[pod]:
                del pods[pod]
                if not pods:
                    del self._ends[block]

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, up to the last checkpoint in the prompt. O(blocks) while there are any."""
        while self._computed and self._computed[0][0] <= now_s:
            self.withdraw(*self._computed.popleft()[1:])
        found: dict[PodId, BlocksByTier] = {}
        if not self._ends:
            return found
        for depth, pods in enumerate(map(self._ends.get, hashes), start=1):
            if pods:
                found.update(dict.fromkeys(pods, (depth, 0, 0, 0)))
        return found

    def forget(self, pod: PodId) -> None:
        """Drop what counts for computed prompts."""
        computed, self._computed = self._computed, deque()
        for one in computed:
            if one[1] == pod:
                self.withdraw(pod, one[2])
            else:
                self._computed.append(one)
