"""How far does a prompt agree with blocks that are kept together?

A chain hash stands for all that is before it, so blocks that were only ever seen together need not be kept one by one:
a run of them stands under the hash of its first. This file keeps nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from router.types import BlockHash


def common_blocks(run: Sequence[BlockHash], hashes: Sequence[BlockHash], start: int) -> int:
    """How many of the run's blocks, of which the first is `hashes[start]`, are those of `hashes` from there on. O(1)
    where it is all, else O(log)."""
    most = min(len(run), len(hashes) - start)
    if run[most - 1] == hashes[start + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda at: run[at] != hashes[start + at])
