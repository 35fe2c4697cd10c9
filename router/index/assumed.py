"""Which blocks do the windows of a pod have whose events do not say it?

A pod whose layers all have windows is assumed to have the ends of the prompts that it has computed, up to the size of
its cache. Those that were used longest ago are evicted first, as the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from router.index.layers import HitRule
from router.types import BlockChange, BlockHash, Tier

MAX_BLOCKS = 1 << 18
"""Blocks of a type of layers of one pod, however large it says that its cache is."""


class AssumedWindows:
    """The assumed blocks of one pod, by type of layers."""

    def __init__(self) -> None:
        self._held: dict[int, dict[BlockHash, None]] = {}
        """In order of use."""

    def computed(
        self, rule: HitRule, hashes: Sequence[BlockHash], ends: Sequence[BlockHash], unit_tokens: int, capacity: int
    ) -> list[BlockChange]:
        """What changes with a prompt of these blocks that can be hit after `ends`. O(blocks of the windows)."""
        changes = list[BlockChange]()
        for layer, one in enumerate(rule.types):
            held, needed = self._held.setdefault(layer, {}), one.needed_blocks * one.block_tokens // unit_tokens
            kept = dict[BlockHash, None]()
            for end in ends:
                last = next(at for at in range(len(hashes), 0, -1) if hashes[at - 1] == end)
                kept |= dict.fromkeys(hashes[max(last - needed, 0) : last + rule.dropped_tokens // unit_tokens])
            added = [block for block in kept if held.pop(block, kept) is kept]
            held |= kept
            evicted = list(islice(held, max(len(held) - min(capacity, MAX_BLOCKS), 0)))
            for block in evicted:
                del held[block]
            changes += BlockChange(Tier.GPU, True, added, layer), BlockChange(Tier.GPU, False, evicted, layer)
        return changes

    def dropped(self) -> list[BlockChange]:
        """What changes when nothing is assumed of the pod any more."""
        return [BlockChange(Tier.GPU, False, list(held), layer) for layer, held in self._held.items()]
