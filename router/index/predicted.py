"""What must a pod hold by now, because this router has just sent it there?

Fills the time between dispatch and the engine's own events, and is all there is for engines that publish none: for
those it models the engine's cache, least recently dispatched first out, up to its capacity. A match does not count as
use; only a dispatch does. Every method takes the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.index.masks import HolderMasks
from router.types import BlockHash, BlocksByTier, PodId


class PredictedIndex:
    """Dispatched blocks by pod, each until its time is up."""

    def __init__(self) -> None:
        self._masks = HolderMasks()
        self._expiry_s: dict[PodId, dict[BlockHash, float]] = {}
        """By pod: block to the time at which it is forgotten, least recently dispatched first."""

    def __len__(self) -> int:
        return sum(map(len, self._expiry_s.values()))

    def record(
        self, pod: PodId, hashes: Sequence[BlockHash], now_s: float, *, ttl_s: float, capacity_blocks: int | None = None
    ) -> None:
        """`pod` was sent a prompt of these blocks. The deepest count as least recent: engines evict tails first."""
        slot = self._masks.slot(pod)
        expiry_s = self._expiry_s.setdefault(pod, {})
        for block in reversed(hashes):
            expiry_s.pop(block, None)
            expiry_s[block] = now_s + ttl_s
            self._masks.add(slot, block)
        if capacity_blocks is not None:
            while len(expiry_s) > capacity_blocks:
                self._drop(slot, expiry_s, next(iter(expiry_s)))

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, all counted in the GPU tier."""
        self._expire(now_s)
        return self._masks.walk(hashes)

    def forget(self, pod: PodId) -> None:
        """The pod's cache is gone."""
        blocks = self._expiry_s.pop(pod, None)
        if blocks is not None:
            self._masks.forget(pod, blocks)

    def _expire(self, now_s: float) -> None:
        for pod, expiry_s in self._expiry_s.items():
            slot = self._masks.slot(pod)
            while expiry_s:
                block = next(iter(expiry_s))
                if expiry_s[block] > now_s:
                    break
                self._drop(slot, expiry_s, block)

    def _drop(self, slot: int, expiry_s: dict[BlockHash, float], block: BlockHash) -> None:
        del expiry_s[block]
        self._masks.remove(slot, block)
