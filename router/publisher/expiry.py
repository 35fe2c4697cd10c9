"""Which blocks were announced so long ago that they can hardly still be there?

Some tiers never announce that a block is gone. What a holder told of such a tier is taken back after a while, unless it
tells it again. Pure: every method takes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

Copy = tuple[Tier, int, int]
"""(tier, attention group, engine hash)."""


class TierExpiry:
    """Announced blocks of one holder, by tier with a time to live."""

    def __init__(self, ttl_s: Mapping[Tier, float]) -> None:
        self._ttl_s = ttl_s
        self._announced: dict[Tier, OrderedDict[Copy, tuple[float, int]]] = {tier: OrderedDict() for tier in ttl_s}
        """By tier, least recently announced first: when, and how many copies."""

    def note(self, events: Iterable[KvEvent], now_s: float) -> None:
        """Take note of what the holder told."""
        for event in events:
            if isinstance(event, BlocksCleared):
                for announced in self._announced.values():
                    announced.clear()
            elif event.tier in self._announced:
                self._note(event, now_s)

    def due(self, now_s: float) -> Iterator[BlocksRemoved]:
        """What the holder would have said of the blocks whose time is up: once for each copy."""
        for tier, announced in self._announced.items():
            oldest_s = now_s - self._ttl_s[tier]
            while announced and next(iter(announced.values()))[0] <= oldest_s:
                (_, group, engine_hash), (_, copies) = announced.popitem(last=False)
                for _ in range(copies):
                    yield BlocksRemoved(block_hashes=(engine_hash,), tier=tier, group=group)

    def _note(self, event: BlocksStored | BlocksRemoved, now_s: float) -> None:
        announced = self._announced[event.tier]
        for engine_hash in event.block_hashes:
            copy = (event.tier, event.group, engine_hash)
            _, copies = announced.pop(copy, (0.0, 0))
            copies += 1 if isinstance(event, BlocksStored) else -1
            if copies > 0:
                announced[copy] = now_s, copies
