"""What has changed since Redis was last told?

Changes of one holder, coalesced: a block that came and went again, or went and came, has not changed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from router.types import BlockChange, BlockHash, Tier


class PendingChanges:
    """Blocks by tier with what they are to become. Every noted change must really be one."""

    def __init__(self) -> None:
        self._becomes: dict[Tier, dict[BlockHash, bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._becomes.values()))

    def note(self, change: BlockChange) -> None:
        """Blocks came (and were not there before) or went (and were)."""
        becomes = self._becomes.setdefault(change.tier, {})
        if becomes.keys().isdisjoint(change.blocks):  # mostly, and six times as fast
            becomes.update(dict.fromkeys(change.blocks, change.held))
            return
        for block in change.blocks:
            if becomes.pop(block, change.held) is change.held:
                becomes[block] = change.held

    def take(self, most_blocks: int) -> list[BlockChange]:
        """Up to so many blocks, the ones that changed first; they are no longer pending."""
        taken: list[BlockChange] = []
        for tier, becomes in self._becomes.items():
            some = list(islice(becomes.items(), most_blocks - sum(len(change.blocks) for change in taken)))
            for block, _ in some:
                del becomes[block]
            for held in (False, True):
                if blocks := [block for block, becoming in some if becoming is held]:
                    taken.append(BlockChange(tier, held, blocks))
        return taken

    def clear(self) -> None:
        """Nothing is pending."""
        self._becomes.clear()


def in_pieces(held: Mapping[Tier, Sequence[BlockHash]], most_blocks: int) -> Iterator[list[BlockChange]]:
    """All that is held, as changes of so many blocks at the most."""
    for tier, blocks in held.items():
        for start in range(0, len(blocks), most_blocks):
            yield [BlockChange(tier, True, blocks[start : start + most_blocks])]
