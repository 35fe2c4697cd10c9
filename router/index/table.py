"""An open-addressing hash table in flat memory: 64-bit block hashes to rows of bit planes.

A whole prompt is looked up at once in C; a loop over a Python dict takes 220 us for 512 blocks of ten million. Keys are
never removed, as a removed block often returns; `HolderMasks` moves the used rows to a new table when this one is full
and defines what the bits mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from router.types import BlockHash

Hashes: TypeAlias = NDArray[np.uint64]
Rows: TypeAlias = NDArray[np.int64]
Plane: TypeAlias = NDArray[np.uint64]

SCATTER = 0x9E3779B97F4A7C15
"""Fibonacci hashing's multiplier."""

MAX_LOAD = 0.65
"""Maximum share of used rows, so that probe sequences stay short."""

_SMALL_BATCH = 24
"""Up to this number of blocks, a plain loop is faster than numpy."""

_U64 = (1 << 64) - 1


class BlockTable:
    """`capacity` rows, a power of two. Hash 0 marks a free row; `as_hashes` never returns it.

    Clear a table with `prepare`, slice by slice, before its first use: the first access to new memory is slow.
    `scatter` is an odd multiplier that maps hashes to rows; clients that do not know it cannot provoke collisions."""

    def __init__(self, capacity: int, planes: Iterable[int] = (), scatter: int = SCATTER) -> None:
        self.capacity = capacity
        self.used = 0
        self.keys: Hashes = np.empty(capacity, np.uint64)
        self.planes: dict[int, Plane] = {number: np.empty(capacity, np.uint64) for number in planes}
        self._prepared_rows = 0
        self._keys = memoryview(self.keys)  # type: ignore[arg-type]  # numpy arrays are buffers
        self._mask = capacity - 1
        self._scatter = scatter
        self._shift = 64 - capacity.bit_length() + 1

    @property
    def bytes(self) -> int:
        return 8 * self.capacity * (1 + len(self.planes))

    def prepare(self, rows: int) -> bool:
        """Clear the next `rows` rows. True once all rows are clear."""
        piece = slice(self._prepared_rows, self._prepared_rows + rows)
        self._prepared_rows += rows
        for column in (self.keys, *self.planes.values()):
            column[piece] = 0
        return self._prepared_rows >= self.capacity

    def has_room_for(self, blocks: int) -> bool:
        return self.used + blocks <= MAX_LOAD * self.capacity

    def plane(self, number: int) -> Plane:
        """The plane with this number, allocated on first use."""
        plane = self.planes.get(number)
        if plane is None:
            plane = self.planes[number] = np.zeros(self.capacity, np.uint64)
        return plane

    def find(self, hashes: Hashes) -> Rows:
        """The row of each block, -1 for an absent block."""
        if len(hashes) <= _SMALL_BATCH:
            return np.array([self._find_one(block) for block in hashes.tolist()], np.int64)
        rows = self._home_rows(hashes)
        keys = self.keys.take(rows)
        unresolved = np.flatnonzero(keys != hashes)
        while len(unresolved) > _SMALL_BATCH:
            at, wanted = rows[unresolved] + 1 & self._mask, hashes[unresolved]
            at[keys[unresolved] == 0] = -1
            rows[unresolved] = at
            keys[unresolved] = found = self.keys.take(at, mode="clip")
            unresolved = unresolved[(found != wanted) & (at >= 0)]
        for number in unresolved.tolist():
            rows[number] = self._find_one(int(hashes[number]))
        return rows

    def place(self, hashes: Hashes) -> Rows:
        """The row of each block; absent blocks are inserted. Check `has_room_for` first."""
        if len(hashes) <= _SMALL_BATCH:
            return np.array([self._place_one(block) for block in hashes.tolist()], np.int64)
        rows = self._home_rows(hashes)
        unresolved = np.arange(len(hashes))
        while len(unresolved) > _SMALL_BATCH:
            at, wanted = rows[unresolved], hashes[unresolved]
            keys = self.keys.take(at)
            free = keys == 0
            if free.any():
                self.keys[at[free]] = wanted[free]  # if two blocks want one row, the last one gets it
                keys = self.keys.take(at)
                self.used += int(np.count_nonzero(free & (keys == wanted)))
            unresolved = unresolved[keys != wanted]
            rows[unresolved] = rows[unresolved] + 1 & self._mask
        for number in unresolved.tolist():
            rows[number] = self._place_one(int(hashes[number]))
        return rows

    def _home_rows(self, hashes: Hashes) -> Rows:
        rows: Rows = (hashes * np.uint64(self._scatter) >> np.uint64(self._shift)).astype(np.int64)
        return rows

    def _find_one(self, block: BlockHash) -> int:
        keys, row = self._keys, (block * self._scatter & _U64) >> self._shift
        while (key := keys[row]) != block:
            if key == 0:
                return -1
            row = row + 1 & self._mask
        return row

    def _place_one(self, block: BlockHash) -> int:
        keys, row = self._keys, (block * self._scatter & _U64) >> self._shift
        while (key := keys[row]) != block:
            if key == 0:
                keys[row] = block
                self.used += 1
                return row
            row = row + 1 & self._mask
        return row


def as_hashes(blocks: object) -> Hashes:
    """Blocks as an array of u64. Hash 0 becomes 1, because 0 marks a free row."""
    hashes = np.asarray(blocks, np.uint64)
    return np.maximum(hashes, np.uint64(1))
