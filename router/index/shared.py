"""Which leading blocks does so much of the traffic share that they tell nothing apart?

In the public conversation trace every request shares its first block; behind one system prompt all requests share
hundreds. A routing key that ends inside such a prefix sends everything to one pod. Shares are learnt online: a sample
of the prompts is counted block by block, with decay. Since chain hashes cover the whole prefix, counts only fall with
depth, so that the depth at which a prefix stops being shared is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from router.types import BlockHash

HEAVY_SHARE = 1.5
"""A prefix that carries more than this times one pod's fair share of the traffic must live on several pods."""
WINDOW_PROMPTS = 128
"""Counts are halved when this many counted prompts have come: about how many are remembered."""
SETTLED_PROMPTS = 8
"""Nothing counts as shared before this many were seen."""
EVERY_PROMPT_UNTIL = 32
"""The first ones are all counted, later one in `SAMPLE`."""
SAMPLE = 8
_SCATTER = 0x9E3779B1
"""Odd constant of Fibonacci hashing: scatters the sample, so that it cannot fall in step with periodic traffic."""


class SharedPrefixes:
    """Decayed counts of the prefixes of one model's traffic."""

    def __init__(self) -> None:
        self._counts: Counter[BlockHash] = Counter()
        self._counted = 0.0
        self._seen = 0

    def __len__(self) -> int:
        return len(self._counts)

    def observe(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """Take note of one prompt; returns how many of its leading blocks more than `threshold` of the traffic shares.

        O(log blocks), and O(blocks) for a counted one.
        """
        self._seen += 1
        if self._seen <= EVERY_PROMPT_UNTIL or (self._seen * _SCATTER >> 13) % SAMPLE == 0:
            self._count(hashes)
        return self.shared(hashes, threshold=threshold)

    def shared(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """The same without taking note of it. O(log blocks)."""
        if self._seen < SETTLED_PROMPTS:
            return 0
        heavy = max(threshold * self._counted, 2.0)
        counts = self._counts
        if not hashes or counts.get(hashes[0], 0.0) <= heavy:
            return 0
        return bisect_left(hashes, True, key=lambda block: counts.get(block, 0.0) <= heavy)

    def _count(self, hashes: Sequence[BlockHash]) -> None:
        if self._counted >= WINDOW_PROMPTS:
            self._counted /= 2
            halves = {block: count / 2 for block, count in self._counts.items() if count >= 2.0}
            self._counts = Counter(halves)
        self._counted += 1
        self._counts.update(hashes)
