"""Which blocks does a pod have whose layers all have windows, which its events do not say?

Those at the ends of the prompts that it has computed, up to the size of its cache. As on the engine, those that were
used longest ago are evicted first.
"""

from __future__ import annotations

from itertools import islice

from router.index.layers import HitRule
from router.index.predicted import Prediction
from router.types import BlockChange, BlockHash, Tier

MAX_BLOCKS = 1 << 18
"""Blocks of a type of layers of one pod, however large it says that its cache is."""


class AssumedWindows:
    """The assumed blocks of one pod, by type of layers."""

    def __init__(self) -> None:
        self._held: dict[int, dict[BlockHash, None]] = {}
        """In order of use."""

    def computed(self, rule: HitRule, sent: Prediction, unit_tokens: int) -> list[BlockChange]:
        """What changes with a prompt. O(blocks of the windows)."""
        changes = list[BlockChange]()
        for layer, one in enumerate(rule.types):
            held, needed = self._held.setdefault(layer, {}), one.needed_blocks * one.block_tokens // unit_tokens
            kept = dict[BlockHash, None]()
            for end in sent.ends:
                last = next(at for at in range(len(sent.hashes), 0, -1) if sent.hashes[at - 1] == end)
                kept |= dict.fromkeys(sent.hashes[max(last - needed, 0) : last + rule.dropped_tokens // unit_tokens])
            added = [block for block in kept if held.pop(block, kept) is kept]
            held |= kept
            evicted = list(islice(held, max(len(held) - min(sent.capacity_blocks or 0, MAX_BLOCKS), 0)))
            for block in evicted:
                del held[block]
            changes += BlockChange(Tier.GPU, True, added, layer), BlockChange(Tier.GPU, False, evicted, layer)
        return changes
