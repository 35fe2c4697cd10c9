"""Which leading blocks does so much of the traffic share that they tell nothing apart?

In the public conversation trace every request shares its first block; behind one system prompt all requests share
hundreds. A routing key that ends inside such a prefix sends everything to one pod. Shares are learnt online: a sample
of the prompts is counted, with decay. Blocks that were only ever counted together have one count, as a run under the
hash of its first. Since chain hashes cover the whole prefix, counts only fall with depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.index.runs import common_blocks
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


class _Run(msgspec.Struct, gc=False):
    """Blocks that follow on one another, and how often prompts had them."""

    blocks: Sequence[BlockHash]
    count: float


class SharedPrefixes:
    """Decayed counts of the prefixes of one model's traffic."""

    def __init__(self) -> None:
        self._runs: dict[BlockHash, _Run] = {}
        """By their first blocks."""
        self._counted = 0.0
        self._seen = 0

    def __len__(self) -> int:
        return sum(len(run.blocks) for run in self._runs.values())

    def observe(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """Take note of one prompt; returns how many of its leading blocks more than `threshold` of the traffic shares.

        O(runs), and O(blocks) for a counted one.
        """
        self._seen += 1
        if self._seen <= EVERY_PROMPT_UNTIL or (self._seen * _SCATTER >> 13) % SAMPLE == 0:
            self._count(hashes)
        return self.shared(hashes, threshold=threshold)

    def shared(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """The same without taking note of it. O(runs)."""
        if self._seen < SETTLED_PROMPTS:
            return 0
        heavy = max(threshold * self._counted, 2.0)
        runs, start, end = self._runs, 0, len(hashes)
        while start < end and (run := runs.get(hashes[start])) is not None and run.count > heavy:
            common = common_blocks(run.blocks, hashes, start)
            start += common
            if common < len(run.blocks):
                break
        return start

    def _count(self, hashes: Sequence[BlockHash]) -> None:
        if self._counted >= WINDOW_PROMPTS:
            self._counted /= 2
            self._runs = {
                block: _Run(run.blocks, run.count / 2) for block, run in self._runs.items() if run.count >= 2.0
            }
        self._counted += 1
        runs, start, end = self._runs, 0, len(hashes)
        while start < end:
            run = runs.get(hashes[start])
            if run is None:
                runs[hashes[start]] = _Run(hashes[start:], 1.0)
                return
            common = common_blocks(run.blocks, hashes, start)
            if common < len(run.blocks):
                self._cut(run, common)
            run.count += 1
            start += common

    def _cut(self, run: _Run, at: int) -> None:
        """Make two of it; it stays the front."""
        rest = _Run(run.blocks[at:], run.count)
        run.blocks = run.blocks[:at]
        self._runs[rest.blocks[0]] = rest
