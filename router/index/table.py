"""Where is the row of each block, in flat memory?

An open-addressing table from 64-bit block hashes to rows, with bit planes of 64 bits a row beside it. Whole prompts are
looked up at once in C: a walk over Python's own dict is one cache miss after the other, 220 us for 512 blocks of ten
million. Keys are never taken out (a block that left is likely to come back); `HolderMasks` moves what is alive into a
new table when this one is full. This file does not know what a bit means.
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

FULLEST = 0.65
"""Part of the rows that may be in use: chains of occupied rows stay short."""

_FEW = 24
"""Up to so many blocks, a plain loop is faster than calls into numpy."""

_U64 = (1 << 64) - 1


class BlockTable:
    """`capacity` rows, a power of two. Hash 0 marks a free row; `as_hashes` has none.

    A large table must be prepared before its first use, slice by slice: memory that the system has just given costs
    most when it is touched first, and a prompt's blocks touch all of it at once. `scatter`, odd, spreads hashes over
    the rows in a way that nobody can foresee who does not know it."""

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
        """Memory of keys and planes."""
        return 8 * self.capacity * (1 + len(self.planes))

    def prepare(self, rows: int) -> bool:
        """Clear the next rows. True once all are."""
        piece = slice(self._prepared_rows, self._prepared_rows + rows)
        self._prepared_rows += rows
        for column in (self.keys, *self.planes.values()):
            column[piece] = 0
        return self._prepared_rows >= self.capacity

    def has_room_for(self, blocks: int) -> bool:
        """May so many more keys come in?"""
        return self.used + blocks <= FULLEST * self.capacity

    def plane(self, number: int) -> Plane:
        """The plane of that number, made on first use; memory is taken as rows are written."""
        plane = self.planes.get(number)
        if plane is None:
            plane = self.planes[number] = np.zeros(self.capacity, np.uint64)
        return plane

    def find(self, hashes: Hashes) -> Rows:
        """The row of each block, -1 where it has none."""
        if len(hashes) <= _FEW:
            return np.array([self._find_one(block) for block in hashes.tolist()], np.int64)
        rows = self._home_rows(hashes)
        keys = self.keys.take(rows)
        astray = np.flatnonzero(keys != hashes)
        while len(astray) > _FEW:
            at, wanted = rows[astray] + 1 & self._mask, hashes[astray]
            at[keys[astray] == 0] = -1
            rows[astray] = at
            keys[astray] = found = self.keys.take(at, mode="clip")
            astray = astray[(found != wanted) & (at >= 0)]
        for number in astray.tolist():
            rows[number] = self._find_one(int(hashes[number]))
        return rows

    def place(self, hashes: Hashes) -> Rows:
        """The row of each block, given out where it had none. Ask `has_room_for` first."""
        if len(hashes) <= _FEW:
            return np.array([self._place_one(block) for block in hashes.tolist()], np.int64)
        rows = self._home_rows(hashes)
        astray = np.arange(len(hashes))
        while len(astray) > _FEW:
            at, wanted = rows[astray], hashes[astray]
            keys = self.keys.take(at)
            free = keys == 0
            if free.any():
                self.keys[at[free]] = wanted[free]  # of two that want one row, the last has it
                keys = self.keys.take(at)
                self.used += int(np.count_nonzero(free & (keys == wanted)))
            astray = astray[keys != wanted]
            rows[astray] = rows[astray] + 1 & self._mask
        for number in astray.tolist():
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
    """Blocks, as ints or as an array of them, in the table's form. 0 stands for "free" there, so it becomes 1."""
    hashes = np.asarray(blocks, np.uint64)
    return np.maximum(hashes, np.uint64(1))
