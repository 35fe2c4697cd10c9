"""Where will hits be able to end on a pod that is computing a prompt, if its windows and states keep checkpoints?

Covers the time from a dispatch to the engine's events. A checkpoint is identified by the block in front of it, whose
chain hash identifies the whole prefix. Methods take the time, which must not go backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from router.types import BlockHash, BlocksByTier, PodId

KEPT_S = 3.0
"""Events of a prompt arrive before its first token, through Redis within a second. Then they alone count."""


class _End(msgspec.Struct, gc=False):
    """A checkpoint on one pod. `pending`: prompts that are being computed and will keep it. `until_s`: until when it
    counts for those that have been; 0 if there are none."""

    pending: int = 0
    until_s: float = 0.0


class Checkpoints:
    """The checkpoints that pods have not announced yet. Every `begin` is followed by one `confirm` or `withdraw`."""

    def __init__(self) -> None:
        self._ends: dict[BlockHash, dict[PodId, _End]] = {}
        self._confirmed: deque[tuple[float, PodId, Sequence[BlockHash]]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def begin(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._ends.setdefault(block, {}).setdefault(pod, _End()).pending += 1

    def confirm(self, pod: PodId, ends: Sequence[BlockHash], now_s: float) -> None:
        """The prompt is computed."""
        for block in ends:
            end = self._ends[block][pod]
            end.pending -= 1
            end.until_s = now_s + KEPT_S
        if ends:
            self._confirmed.append((now_s + KEPT_S, pod, ends))

    def withdraw(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._ends[block][pod].pending -= 1
            self._drop_unused(pod, block)

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, up to the last checkpoint in the prompt. O(blocks) while there are any."""
        while self._confirmed and self._confirmed[0][0] <= now_s:
            _, pod, ends = self._confirmed.popleft()
            self._expire(pod, ends, now_s)
        if not self._ends:
            return {}
        found: dict[PodId, BlocksByTier] = {}
        for depth, pods in enumerate(map(self._ends.get, hashes), start=1):
            if pods:
                found.update(dict.fromkeys(pods, (depth, 0, 0, 0)))
        return found

    def forget(self, pod: PodId) -> None:
        """Drop what counts for computed prompts."""
        for _, holder, ends in self._confirmed:
            if holder == pod:
                self._expire(pod, ends, float("inf"))

    def _expire(self, pod: PodId, ends: Sequence[BlockHash], now_s: float) -> None:
        for block in ends:
            if (end := self._ends.get(block, {}).get(pod)) and end.until_s <= now_s:
                end.until_s = 0.0
                self._drop_unused(pod, block)

    def _drop_unused(self, pod: PodId, block: BlockHash) -> None:
        pods = self._ends[block]
        if not pods[pod].pending and not pods[pod].until_s:
            del pods[pod]
            if not pods:
                del self._ends[block]
