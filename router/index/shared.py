"""Which leading blocks are shared by so much of the traffic that they are useless as a routing key?

In the public conversation trace all requests share their first block; with one system prompt all requests share
hundreds. A routing key that ends inside such a prefix sends all requests to one pod. Shares are measured online: a
sample of the prompts is counted, with decay. Blocks that always occur together form a run with one count, stored by the
hash of its first block. Chain hashes cover the whole prefix, so counts only decrease with depth.

A prompt that continues another one, as the next turn of a session does, counts as one with it: the turns come one after
another and need one pod. Else one busy session of a few would make its own prompts look like everybody's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from router.types import BlockHash

HEAVY_SHARE = 1.5
"""A prefix with more traffic than this multiple of one pod's fair share must be cached on several pods."""
WINDOW_PROMPTS = 128
"""Counts are halved after this number of counted prompts."""
SETTLED_PROMPTS = 8
"""Prompts to observe before any block counts as shared."""
EVERY_PROMPT_UNTIL = 32
"""The first prompts are all counted, later ones one in `SAMPLE`."""
SAMPLE = 8
MAX_COUNTED_BLOCKS = 8192
"""Leading blocks of a prompt that are counted: up to 256 prompts are stored, which have any length."""
NEW_PER_LOST_BLOCK = 4
"""The next turn of a session may lack the end of the one before, if it adds this multiple of it. Another question about
the same document adds about as much as it lacks."""
_SCATTER = 0x9E3779B1
"""Multiplier of Fibonacci hashing: spreads the sample, so that periodic traffic cannot bias it."""


class _CountedRun(msgspec.Struct, gc=False):
    """Consecutive blocks and their decayed count. `is_end`: no counted prompt goes on behind them."""

    blocks: Sequence[BlockHash]
    count: float
    is_end: bool = True


class SharedPrefixes:
    """Decayed prefix counts of one model's traffic."""

    def __init__(self) -> None:
        self._runs: dict[BlockHash, _CountedRun] = {}
        """By first block."""
        self._counted = 0.0
        self._seen = 0

    def __len__(self) -> int:
        return sum(len(run.blocks) for run in self._runs.values())

    def observe(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """Record a prompt. Returns how many of its leading blocks are shared by more than `threshold` of the traffic.

        O(runs), and O(blocks) for a prompt that is counted.
        """
        self._seen += 1
        if self._seen <= EVERY_PROMPT_UNTIL or (self._seen * _SCATTER >> 13) % SAMPLE == 0:
            self._count(hashes)
        return self.shared(hashes, threshold=threshold)

    def shared(self, hashes: Sequence[BlockHash], *, threshold: float) -> int:
        """The result of `observe` without recording the prompt. O(runs)."""
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
        if len(hashes) > MAX_COUNTED_BLOCKS:
            hashes = hashes[:MAX_COUNTED_BLOCKS]
        path, start = list[_CountedRun](), 0
        while start < len(hashes) and (run := self._runs.get(hashes[start])) is not None:
            common = common_blocks(run.blocks, hashes, start)
            if _continues(run, common, len(hashes) - start - common):
                run.blocks = hashes[start:]
                return
            if common < len(run.blocks):
                self._split(run, common)
            path.append(run)
            start += common
        for run in path:
            run.count += 1
        if start < len(hashes):
            if path:
                path[-1].is_end = False
            self._runs[hashes[start]] = _CountedRun(hashes[start:], 1.0)
        self._counted += 1
        if self._counted > WINDOW_PROMPTS:
            self._halve()

    def _split(self, run: _CountedRun, at: int) -> None:
        """Split the run; `run` keeps the first `at` blocks."""
        rest = _CountedRun(run.blocks[at:], run.count, run.is_end)
        run.blocks, run.is_end = run.blocks[:at], False
        self._runs[rest.blocks[0]] = rest

    def _halve(self) -> None:
        self._counted /= 2
        kept = {block: run for block, run in self._runs.items() if run.count >= 2.0}
        for run in kept.values():
            run.count /= 2
        self._runs = kept


def _continues(run: _CountedRun, common: int, new_blocks: int) -> bool:
    """Whether a prompt goes on where the only prompt of a run ended, or replaces the last few blocks of it."""
    lost_blocks = len(run.blocks) - common
    return run.is_end and run.count <= 1.0 and 0 < new_blocks >= NEW_PER_LOST_BLOCK * lost_blocks


def common_blocks(run: Sequence[BlockHash], hashes: Sequence[BlockHash], start: int) -> int:
    """Number of leading blocks of `run` that equal those of `hashes` from `start` on, at least 1. O(1) or O(log).

    A chain hash identifies everything before it, so equality can be searched by bisection."""
    limit = min(len(run), len(hashes) - start)
    if run[limit - 1] == hashes[start + limit - 1]:
        return limit
    return bisect_left(range(limit), True, key=lambda at: run[at] != hashes[start + at])
