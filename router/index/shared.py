"""Which leading blocks does so much of the traffic share that they tell nothing apart?

In the public conversation trace every request shares its first block; behind one system prompt all requests share
hundreds. A routing key that ends inside such a prefix sends everything to one pod. Shares are learnt online from
decayed counts of chain hashes, and only as deep as a prefix is heavy, so that the work and the memory stay small.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.types import BlockHash

WINDOW_REQUESTS = 512
"""Counts are halved when this many have been added: about how many requests are remembered."""
SETTLED_REQUESTS = 16
"""Nothing counts as shared before this many were seen."""


class SharedPrefixes:
    """Decayed counts of the heavy prefixes of one model's traffic."""

    def __init__(self) -> None:
        self._counts: dict[BlockHash, float] = {}
        self._total = 0.0

    def observe(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """Count one prompt; returns how many of its leading blocks more than `threshold` of recent traffic shares.

        O(returned depth). A block deeper down is only counted while the one before it is heavy.
        """
        if self._total >= WINDOW_REQUESTS:
            self._halve()
        self._total += 1
        heavy = max(threshold * self._total, 1.0)
        depth, counts = 0, self._counts
        for block in hashes:
            count = counts.get(block, 0.0) + 1
            counts[block] = count
            if count <= heavy:
                break
            depth += 1
        return depth if self._total >= SETTLED_REQUESTS else 0

    def _halve(self) -> None:
        self._total /= 2
        self._counts = {block: count / 2 for block, count in self._counts.items() if count >= 1.0}
