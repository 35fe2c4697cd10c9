"""Who holds each block, compactly, and how far does each holder's run of a prompt reach?

A row of bits for each block, one bit a holder and tier: planes of 64 holders, made when the first of them has a block
in that tier. The table is renewed a slice at a time, with every change, so that nothing ever waits for a whole pass
over it: neither when it grows nor when a holder with a million blocks leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from router.index.table import SCATTER, BlockTable, Hashes, Rows, as_hashes
from router.types import BlocksByTier, PodId, Tier

FIRST_ROWS = 1 << 10
SLICE_ROWS = 1 << 14
"""Rows that are prepared, moved or swept with one change, at the least: some tens of microseconds."""
_RENEW_AT = 0.5
"""Part of the rows in use at which a new table is begun; there is room in the old one until the new one is ready."""
_ALIVE = 0.3
"""Part of a new table's rows that are alive when it begins, at the most."""
_LANES = 64
_TIERS = len(Tier)
_ONE = np.uint64(1)

Bits = NDArray[np.uint64]


class _Renewal(Enum):
    """What is being done to the table."""

    NONE = 0
    PREPARING = 1
    """`_next` is being cleared, and not yet used."""
    MOVING = 2
    """`_table` is the new one; the rows of `_full` are moving in."""


class HolderMasks:
    """Blocks by hash, holders by slot. Blocks are given as ints or as an array of u64, none of them twice at once.

    `max_bytes` bounds the table; blocks that would not fit are left out and counted in `left_out`."""

    def __init__(self, max_bytes: int | None = None, scatter: int = SCATTER) -> None:
        self._max_bytes = max_bytes
        self._scatter = scatter | 1
        self._table = BlockTable(FIRST_ROWS, scatter=self._scatter)
        self._table.prepare(FIRST_ROWS)
        self._other: BlockTable | None = None
        """The next table while it is PREPARING, the one before while it is MOVING."""
        self._renewal = _Renewal.NONE
        self._moved_rows = 0
        self._slots: dict[PodId, int] = {}
        self._holders: list[PodId | None] = []
        self._held: list[int] = []
        self._lanes: list[int] = []
        """By word of 64 slots: those that are taken."""
        self._left: dict[int, int] = {}
        """Slots whose holder has left, and up to which row their bits are swept."""
        self.left_out = 0

    @property
    def block_holders(self) -> int:
        """Triples of (block, holder, tier)."""
        return sum(self._held)

    @property
    def bytes(self) -> int:
        """Memory of the tables."""
        return self._table.bytes + (self._other.bytes if self._other else 0)

    def slot(self, holder: PodId) -> int:
        """The holder's slot, given out on first use."""
        slot = self._slots.get(holder)
        if slot is None:
            slot = self._free_slot()
            self._take(slot, holder)
        return slot

    def held(self, holder: PodId) -> int:
        """How many (block, tier) the holder has."""
        slot = self._slots.get(holder)
        return 0 if slot is None else self._held[slot]

    def rename(self, old: PodId, new: PodId) -> None:
        """What `old` holds is `new`'s from now on; what `new` held is forgotten. O(1)."""
        self.forget(new)
        slot = self._slots.pop(old, None)
        if slot is not None:
            self._take(slot, new)

    def add_all(self, slot: int, blocks: object, tier: Tier = Tier.GPU) -> None:
        """The holder now has all of `blocks` in `tier`."""
        hashes = as_hashes(blocks)
        if not len(hashes) or not self._make_room(len(hashes)):
            return
        rows = self._table.place(hashes)
        plane, bit = self._table.plane(_plane(slot, tier)), _bit(slot)
        if self._renewal is _Renewal.MOVING:
            self._held[slot] -= self._clear(self._other, slot, hashes, tier)
        fresh = rows[plane.take(rows) & bit == 0]
        plane[fresh] |= bit
        self._held[slot] += len(fresh)

    def remove_all(self, slot: int, blocks: object, tier: Tier = Tier.GPU) -> None:
        """The holder no longer has any of `blocks` in `tier`."""
        hashes = as_hashes(blocks)
        if not len(hashes):
            return
        self._renew(len(hashes))
        for table in self._tables():
            self._held[slot] -= self._clear(table, slot, hashes, tier)

    def forget(self, holder: PodId) -> None:
        """The holder has left, with all it had. O(1): its bits are swept a slice at a time."""
        slot = self._slots.pop(holder, None)
        if slot is not None:
            self._holders[slot] = None
            self._held[slot] = 0
            self._lanes[slot // _LANES] &= ~(1 << slot % _LANES)
            self._left[slot] = 0

    def walk(self, blocks: object) -> dict[PodId, BlocksByTier]:
        """For each holder of the first block: its leading run, counted in the nearest tier each block lies in."""
        found: dict[PodId, BlocksByTier] = {}
        if not self._table.used and self._other is None:
            return found
        hashes = as_hashes(blocks)
        if not len(hashes):
            return found
        rows = [(table, table.find(hashes)) for table in self._tables()]
        for word, lanes in enumerate(self._lanes):
            tiers = [_gather(rows, word * _TIERS + tier, lanes) for tier in Tier] if lanes else []
            holders = self._holders[word * _LANES : (word + 1) * _LANES]
            for ending, counts in _runs(tiers):
                while ending:
                    lane = ending & -ending
                    ending ^= lane
                    holder = holders[lane.bit_length() - 1]
                    assert holder is not None  # `_gather` masks all others
                    found[holder] = counts
        return found

    # --- slots ---

    def _free_slot(self) -> int:
        """One that is empty and swept, or a new one."""
        for slot, holder in enumerate(self._holders):
            if holder is None and slot not in self._left:
                return slot
        slot = len(self._holders)
        self._holders.append(None)
        self._held.append(0)
        if slot % _LANES == 0:
            self._lanes.append(0)
        return slot

    def _take(self, slot: int, holder: PodId) -> None:
        self._slots[holder] = slot
        self._holders[slot] = holder
        self._lanes[slot // _LANES] |= 1 << slot % _LANES

    # --- tables ---

    def _tables(self) -> tuple[BlockTable, ...]:
        """Those with bits that count."""
        if self._renewal is _Renewal.MOVING and self._other is not None:
            return self._table, self._other
        return (self._table,)

    def _clear(self, table: BlockTable | None, slot: int, hashes: Hashes, tier: Tier) -> int:
        """Clear the slot's bits of these blocks in one table. Returns how many were set."""
        plane = table.planes.get(_plane(slot, tier)) if table else None
        if table is None or plane is None:
            return 0
        rows = table.find(hashes)
        rows = rows[rows >= 0]
        held = rows[plane.take(rows) & _bit(slot) != 0]
        plane[held] &= ~_bit(slot)
        return len(held)

    def _make_room(self, blocks: int) -> bool:
        """Go on with what is to be renewed. False if there is no room for so many more blocks."""
        self._renew(blocks)
        for _ in range(2):
            if self._renewal is _Renewal.NONE and self._table.used + blocks > _RENEW_AT * self._table.capacity:
                self._begin_renewal(blocks)
            while not self._table.has_room_for(blocks) and self._renewal is not _Renewal.NONE:
                self._renew(blocks, at_once=True)  # more came than a slice at a time can keep up with
            if self._table.has_room_for(blocks):
                return True
        self.left_out += blocks
        return False

    def _begin_renewal(self, more: int) -> None:
        """A new table for what is alive, and room for twice as much; unless the bound makes it as full again."""
        alive = _alive_rows(self._table) + more
        capacity = FIRST_ROWS
        while capacity * _ALIVE < alive:
            capacity *= 2
        row_bytes = 8 * (1 + max(len(self._table.planes), 1))
        while self._max_bytes is not None and capacity > FIRST_ROWS and capacity * row_bytes > self._max_bytes:
            capacity //= 2
        if alive <= _RENEW_AT * capacity:
            self._other = BlockTable(capacity, self._table.planes, self._scatter)
            self._renewal = _Renewal.PREPARING

    def _renew(self, blocks: int, *, at_once: bool = False) -> None:
        """Prepare, move or sweep another slice: in proportion to `blocks`, so as to end before the table is full."""
        other = self._other
        rows = other.capacity if at_once and other else max(SLICE_ROWS, 32 * blocks)
        if other is None:
            if self._left:
                self._sweep(rows)
        elif self._renewal is _Renewal.MOVING:
            self._move(other, rows)
        elif other.prepare(rows):
            self._table, self._other = other, self._table
            self._renewal, self._moved_rows = _Renewal.MOVING, 0

    def _move(self, full: BlockTable, count: int) -> None:
        piece = slice(self._moved_rows, self._moved_rows + count)
        planes = {number: plane[piece] & self._kept(number) for number, plane in full.planes.items()}
        alive = np.flatnonzero(np.bitwise_or.reduce(list(planes.values()))) if planes else np.array([], np.int64)
        if len(alive):
            rows = self._table.place(full.keys[piece][alive])
            for number, bits in planes.items():
                self._table.plane(number)[rows] |= bits[alive]
        for plane in full.planes.values():
            plane[piece] = 0
        self._moved_rows += count
        if self._moved_rows >= full.capacity:
            self._other, self._renewal = None, _Renewal.NONE

    def _kept(self, number: int) -> np.uint64:
        """The lanes of that plane that are taken."""
        return np.uint64(self._lanes[number // _TIERS])

    def _sweep(self, count: int) -> None:
        """Clear the next rows of one slot that was left."""
        slot, start = next(iter(self._left.items()))
        for tier in Tier:
            plane = self._table.planes.get(_plane(slot, tier))
            if plane is not None:
                plane[start : start + count] &= ~_bit(slot)
        self._left[slot] = start + count
        if self._left[slot] >= self._table.capacity:
            del self._left[slot]


def _plane(slot: int, tier: Tier) -> int:
    return slot // _LANES * _TIERS + tier


def _bit(slot: int) -> np.uint64:
    return _ONE << np.uint64(slot % _LANES)


def _alive_rows(table: BlockTable) -> int:
    """About how many rows have a bit set, by a sample: rows are as good as random."""
    sample = slice(0, 1 << 16)
    if not table.planes:
        return 0
    alive = np.count_nonzero(np.bitwise_or.reduce([plane[sample] for plane in table.planes.values()]))
    return int(alive) * max(table.capacity >> 16, 1)


def _gather(found: list[tuple[BlockTable, Rows]], number: int, lanes: int) -> Bits | None:
    """The lanes that have each block, from every table that may know; None if no table has the plane."""
    gathered: Bits | None = None
    for table, rows in found:
        plane = table.planes.get(number)
        if plane is not None:
            bits = plane.take(rows, mode="clip") & np.uint64(lanes)
            bits[rows < 0] = 0
            gathered = bits if gathered is None else gathered | bits
    return gathered


def _runs(tiers: list[Bits | None]) -> Iterator[tuple[int, BlocksByTier]]:
    """(lanes, their blocks by tier), for all lanes that have the first block."""
    present = [bits for bits in tiers if bits is not None]
    if not present:
        return
    alive = np.bitwise_and.accumulate(present[0] if len(present) == 1 else np.bitwise_or.reduce(present))
    alive = alive[: np.count_nonzero(alive)]
    if not len(alive):
        return
    if present[0] is tiers[0] and len(present) == 1:
        yield from ((lanes, (depth, 0, 0, 0)) for depth, lanes in _ends(alive))
    else:
        yield from _runs_by_tier(tiers, alive)


def _ends(alive: Bits) -> Iterator[tuple[int, int]]:
    """(depth, lanes whose run ends there). O(lanes)."""
    changes = np.flatnonzero(alive[1:] != alive[:-1])
    before = int(alive[0])
    for depth in changes.tolist():
        after = int(alive[depth + 1])
        yield depth + 1, before ^ after
        before = after
    yield len(alive), before


def _runs_by_tier(tiers: list[Bits | None], alive: Bits) -> Iterator[tuple[int, BlocksByTier]]:
    """Each block counts in the first tier that has it."""
    uncounted = alive
    sums: list[list[int]] = []
    for bits in tiers:
        if bits is None:
            sums.append([0] * _LANES)
            continue
        here = bits[: len(alive)] & uncounted
        uncounted = uncounted & ~here
        sums.append(_column_sums(here))
    for lane in range(_LANES):
        if int(alive[0]) >> lane & 1:
            yield 1 << lane, (sums[0][lane], sums[1][lane], sums[2][lane], sums[3][lane])


def _column_sums(words: Bits) -> list[int]:
    """How often each of the 64 bits is set."""
    bits = np.unpackbits(words.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    sums: list[int] = bits.sum(axis=0, dtype=np.int64).tolist()
    return sums
