"""The changes of one holder that Redis does not have yet, and the blocks whose time to live has passed.

Pure: methods take the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from router.types import BlockChange, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

Copy = tuple[Tier, int, int]
"""(tier, attention group, engine hash)."""


class PendingChanges:
    """Coalesced changes by tier: a block that was added and removed again, or the reverse, is not pending.

    Every change passed to `add` must be an actual one."""

    def __init__(self) -> None:
        self._becomes: dict[Tier, dict[BlockHash, bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._becomes.values()))

    def add(self, change: BlockChange) -> None:
        """Add blocks that are new in a tier, or that were removed from it."""
        becomes = self._becomes.setdefault(change.tier, {})
        if becomes.keys().isdisjoint(change.blocks):  # the usual case, and six times as fast
            becomes.update(dict.fromkeys(change.blocks, change.held))
            return
        for block in change.blocks:
            if becomes.pop(block, change.held) is change.held:
                becomes[block] = change.held

    def take(self, max_blocks: int) -> list[BlockChange]:
        """Remove and return up to `max_blocks`, oldest change first."""
        taken: list[BlockChange] = []
        for tier, becomes in self._becomes.items():
            batch = list(islice(becomes.items(), max_blocks - sum(len(change.blocks) for change in taken)))
            for block, _ in batch:
                del becomes[block]
            for held in (False, True):
                if blocks := [block for block, becoming in batch if becoming is held]:
                    taken.append(BlockChange(tier, held, blocks))
        return taken

    def clear(self) -> None:
        """Drop all changes."""
        self._becomes.clear()


def split_held(held: Mapping[Tier, Sequence[BlockHash]], max_blocks: int) -> Iterator[list[BlockChange]]:
    """All held blocks, as changes of up to `max_blocks` each."""
    for tier, blocks in held.items():
        for start in range(0, len(blocks), max_blocks):
            yield [BlockChange(tier, True, blocks[start : start + max_blocks])]


class TierExpiry:
    """Announced blocks of one holder in tiers with a time to live.

    Some tiers never announce removals, so their blocks are removed when they are not announced again in time."""

    def __init__(self, ttl_s: Mapping[Tier, float]) -> None:
        self._ttl_s = ttl_s
        self._announced: dict[Tier, OrderedDict[Copy, tuple[float, int]]] = {tier: OrderedDict() for tier in ttl_s}
        """By tier, least recently announced first: time and number of copies."""

    def observe(self, events: Iterable[KvEvent], now_s: float) -> None:
        """Record the events of the holder."""
        for event in events:
            if isinstance(event, BlocksCleared):
                for announced in self._announced.values():
                    announced.clear()
            elif event.tier in self._announced:
                self._observe(event, now_s)

    def expired(self, now_s: float) -> Iterator[BlocksRemoved]:
        """Remove the expired blocks and yield their removal events, one per copy."""
        for tier, announced in self._announced.items():
            oldest_s = now_s - self._ttl_s[tier]
            while announced and next(iter(announced.values()))[0] <= oldest_s:
                (_, group, engine_hash), (_, copies) = announced.popitem(last=False)
                for _ in range(copies):
                    yield BlocksRemoved(block_hashes=(engine_hash,), tier=tier, group=group)

    def _observe(self, event: BlocksStored | BlocksRemoved, now_s: float) -> None:
        announced = self._announced[event.tier]
        for engine_hash in event.block_hashes:
            copy = (event.tier, event.group, engine_hash)
            _, copies = announced.pop(copy, (0.0, 0))
            copies += 1 if isinstance(event, BlocksStored) else -1
            if copies > 0:
                announced[copy] = now_s, copies
