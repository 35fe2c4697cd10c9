"""The changes of one holder that Redis does not have yet, and the blocks whose time to live has passed.

Pure: methods take the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from router.index.holder_blocks import HashResolver, HolderBlocks
from router.stores.redis_schema import BlockPlace
from router.types import BlockChange, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, Generation, KvEvent, Tier

Copy = tuple[int, int]
"""(attention group, engine hash)."""


class PendingChanges:
    """Pending changes by place. A block that is added and removed again before a write, or the reverse, cancels out.

    Every change passed to `add` must be an actual one."""

    def __init__(self) -> None:
        self._pending: dict[BlockPlace, dict[BlockHash, bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pending.values()))

    def add(self, change: BlockChange) -> None:
        """Add blocks that are new in a place, or that were removed from it."""
        pending = self._pending.setdefault((change.tier, change.layer), {})
        if pending.keys().isdisjoint(change.blocks):  # the usual case, and six times as fast
            pending.update(dict.fromkeys(change.blocks, change.held))
            return
        for block in change.blocks:
            if pending.pop(block, change.held) is change.held:
                pending[block] = change.held

    def take(self, max_blocks: int) -> list[BlockChange]:
        """Remove and return up to `max_blocks`, oldest change first."""
        taken: list[BlockChange] = []
        for (tier, layer), pending in self._pending.items():
            batch = list(islice(pending.items(), max_blocks - sum(len(change.blocks) for change in taken)))
            for block, _ in batch:
                del pending[block]
            for held in (False, True):
                if blocks := [block for block, is_held in batch if is_held is held]:
                    taken.append(BlockChange(tier, held, blocks, layer))
        return taken

    def clear(self) -> None:
        self._pending.clear()


def split_held(held: Mapping[BlockPlace, Sequence[BlockHash]], max_blocks: int) -> Iterator[list[BlockChange]]:
    """All held blocks, as changes of up to `max_blocks` each."""
    for (tier, layer), blocks in held.items():
        for start in range(0, len(blocks), max_blocks):
            yield [BlockChange(tier, True, blocks[start : start + max_blocks], layer)]


class HolderPlaces:
    """One holder's blocks, and what changes where. Apply its events in order."""

    def __init__(self, generation: Generation, resolve_hash: HashResolver | None = None) -> None:
        self.blocks = HolderBlocks(generation, resolve_hash)
        self._in_layers: dict[BlockPlace, set[BlockHash]] = {}
        """Blocks of layers that keep some only."""

    def held(self) -> dict[BlockPlace, list[BlockHash]]:
        full = {(tier, 0): blocks for tier, blocks in self.blocks.held().items()}
        return full | {place: [*blocks] for place, blocks in self._in_layers.items()}

    def apply(self, event: BlocksStored | BlocksRemoved) -> list[BlockChange]:
        """The changes, without blocks that a place already has, or has not."""
        return self._actual(self.blocks.apply(event))

    def retry(self) -> list[BlockChange]:
        """As `HolderBlocks.retry`."""
        return self._actual(self.blocks.retry())

    def _actual(self, changes: Iterable[BlockChange]) -> list[BlockChange]:
        return [self._in_place(change) if change.layer else change for change in changes]

    def _in_place(self, change: BlockChange) -> BlockChange:
        """Engines may have several hashes for one block."""
        held = self._in_layers.setdefault((change.tier, change.layer), set())
        blocks = [block for block in change.blocks if (block in held) is not change.held]
        (held.update if change.held else held.difference_update)(blocks)
        return BlockChange(change.tier, change.held, blocks, change.layer)


class TierExpiry:
    """Announced blocks of one holder in tiers with a time to live.

    Some tiers never announce removals, so their blocks are removed when they are not announced again in time."""

    def __init__(self, ttl_s: Mapping[Tier, float]) -> None:
        self._ttl_s = ttl_s
        self._announced: dict[Tier, OrderedDict[Copy, tuple[float, int]]] = {tier: OrderedDict() for tier in ttl_s}
        """By tier, least recently announced first: time and number of copies."""

    def observe(self, events: Iterable[KvEvent], now_s: float) -> None:
        for event in events:
            if isinstance(event, BlocksCleared):
                for announced in self._announced.values():
                    announced.clear()
            elif event.tier in self._announced:
                self._observe(event, now_s)

    def expired(self, now_s: float) -> Iterator[BlocksRemoved]:
        for tier, announced in self._announced.items():
            oldest_s = now_s - self._ttl_s[tier]
            while announced and next(iter(announced.values()))[0] <= oldest_s:
                (group, engine_hash), (_, copies) = announced.popitem(last=False)
                for _ in range(copies):
                    yield BlocksRemoved(block_hashes=(engine_hash,), tier=tier, group=group)

    def _observe(self, event: BlocksStored | BlocksRemoved, now_s: float) -> None:
        announced = self._announced[event.tier]
        for engine_hash in event.block_hashes:
            copy = (event.group, engine_hash)
            _, copies = announced.pop(copy, (0.0, 0))
            copies += 1 if isinstance(event, BlocksStored) else -1
            if copies > 0:
                announced[copy] = now_s, copies
