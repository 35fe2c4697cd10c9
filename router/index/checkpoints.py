"""Where will hits be able to end on a pod that is computing a prompt, if its windows and states keep checkpoints?

Covers the time from a dispatch to the engine's events, or longer where these do not say what is kept. A checkpoint is
identified by the block in front of it, whose chain hash identifies the whole prefix. Methods take the time, which must
not go backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

import msgspec

from router.types import BlockHash, BlocksByTier, PodId

UNTIL_EVENTS_S = 3.0
"""Events of a prompt arrive before its first token, through Redis within a second. Then they alone count."""
MAX_CONFIRMED = 1 << 16
"""Computed prompts whose checkpoints count."""


class _End(msgspec.Struct, gc=False):
    """A checkpoint on one pod. `pending`: prompts that are being computed and will keep it. `until_s`: until when it
    counts for those that have been; 0 if there are none."""

    pending: int = 0
    until_s: float = 0.0


class Checkpoints:
    """The checkpoints that pods have not announced yet. Every `begin` is followed by one `confirm` or `withdraw`."""

    def __init__(self) -> None:
        self._ends: dict[BlockHash, dict[PodId, _End]] = {}
        self._confirmed: list[tuple[float, int, PodId, Sequence[BlockHash]]] = []
        """Heap of the computed prompts, each with its end and a number."""
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def begin(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._ends.setdefault(block, {}).setdefault(pod, _End()).pending += 1

    def confirm(self, pod: PodId, ends: Sequence[BlockHash], until_s: float) -> None:
        """The prompt is computed: its checkpoints count until then."""
        for block in ends:
            end = self._ends[block][pod]
            end.pending -= 1
            end.until_s = max(end.until_s, until_s)
        if ends:
            self._number += 1
            heappush(self._confirmed, (until_s, self._number, pod, ends))
        if len(self._confirmed) > MAX_CONFIRMED:
            _, _, pod, ends = heappop(self._confirmed)
            self._expire(pod, ends, inf)

    def withdraw(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._ends[block][pod].pending -= 1
            self._drop_unused(pod, block)

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, up to the last checkpoint in the prompt. O(blocks) while there are any."""
        while self._confirmed and self._confirmed[0][0] <= now_s:
            _, _, pod, ends = heappop(self._confirmed)
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
        for _, _, holder, ends in self._confirmed:
            if holder == pod:
                self._expire(pod, ends, inf)

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
