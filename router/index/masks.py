"""Which holders have each block, and how many leading blocks of a prompt each holder has.

Each block has a row in a table, with one bit per holder and tier. Bits are stored in planes: a plane has one tier of 64
holders, a u64 per row, and is allocated on first use. Holders are numbered by slot; `slot % 64` is the holder's bit,
its lane. When the table grows or a holder leaves, each change processes one more slice of the table, so that no request
waits for a pass over all of it: a table of ten million rows takes about a second.

The table is an open-addressing hash table in flat memory: a whole prompt is looked up at once in C; a loop over a
Python dict takes 220 us for 512 blocks of ten million. Keys are never removed, as a removed block often returns;
`HolderMasks` moves the used rows to a new table when this one is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from router.index.layers import Bits, HitRule, covered
from router.types import BlockChange, BlockHash, BlocksByTier, PodId, Tier

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
            return np.array(self._find_few(hashes.tolist()), np.int64)
        rows = self._home_rows(hashes)
        keys = self.keys.take(rows)
        unresolved = np.flatnonzero(keys != hashes)
        while len(unresolved) > _SMALL_BATCH:
            at, wanted = rows[unresolved] + 1 & self._mask, hashes[unresolved]
            at[keys[unresolved] == 0] = -1
            rows[unresolved] = at
            keys[unresolved] = found = self.keys.take(at, mode="clip")
            unresolved = unresolved[(found != wanted) & (at >= 0)]
        rows[unresolved] = self._find_few(hashes[unresolved].tolist())
        return rows

    def place(self, hashes: Hashes) -> Rows:
        """The row of each block; absent blocks are inserted. Check `has_room_for` first."""
        if len(hashes) <= _SMALL_BATCH:
            return np.array(self._place_few(hashes.tolist()), np.int64)
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
        rows[unresolved] = self._place_few(hashes[unresolved].tolist())
        return rows

    def _home_rows(self, hashes: Hashes) -> Rows:
        rows: Rows = (hashes * np.uint64(self._scatter) >> np.uint64(self._shift)).astype(np.int64)
        return rows

    def _find_few(self, blocks: Iterable[BlockHash]) -> list[int]:
        keys, mask, scatter, shift, rows = self._keys, self._mask, self._scatter, self._shift, list[int]()
        for block in blocks:
            row = (block * scatter & _U64) >> shift
            while (key := keys[row]) != block:
                if key == 0:
                    row = -1
                    break
                row = row + 1 & mask
            rows.append(row)
        return rows

    def _place_few(self, blocks: Iterable[BlockHash]) -> list[int]:
        keys, mask, scatter, shift, rows = self._keys, self._mask, self._scatter, self._shift, list[int]()
        for block in blocks:
            row = (block * scatter & _U64) >> shift
            while (key := keys[row]) != block:
                if key == 0:
                    keys[row] = block
                    self.used += 1
                    break
                row = row + 1 & mask
            rows.append(row)
        return rows


def as_hashes(blocks: object) -> Hashes:
    """Blocks as an array of u64. Hash 0 becomes 1, because 0 marks a free row."""
    hashes = np.asarray(blocks, np.uint64)
    return np.maximum(hashes, np.uint64(1))


MIN_ROWS = 1 << 10
SLICE_ROWS = 1 << 14
"""Minimum rows to clear, move or sweep with one change: tens of microseconds."""
_RENEW_AT = 0.5
"""Share of used rows at which a new table is started; the old one has room until the new one is ready."""
_MAX_INITIAL_LOAD = 0.3
"""Maximum share of a new table's rows that are in use when it starts."""
_LANES = 64
_TIERS = len(Tier)
_LAYER = 1 << 32
"""Distance between the planes of two types of layers."""
_ONE = np.uint64(1)

PromptTokens: TypeAlias = tuple[int, int]
"""The length of a prompt, and of its blocks."""


class HolderMasks:
    """Holders of blocks. A call passes blocks as ints or as a u64 array, without duplicates.

    `max_bytes` limits the table; blocks that do not fit are dropped and counted in `dropped_blocks`."""

    def __init__(self, max_bytes: int | None = None, scatter: int = SCATTER) -> None:
        self._max_bytes = max_bytes
        self._scatter = scatter | 1
        self._table = BlockTable(MIN_ROWS, scatter=self._scatter)
        self._table.prepare(MIN_ROWS)
        self._next: BlockTable | None = None
        """The table that will replace `_table`; it is being cleared and not used yet."""
        self._previous: BlockTable | None = None
        """The replaced table; its rows are moving to `_table`."""
        self._moved_rows = 0
        self._slots: dict[PodId, int] = {}
        self._holders: list[PodId | None] = []
        self._held: list[int] = []
        self._lanes: list[int] = []
        """Bits of the used slots, per word of 64 slots."""
        self._rules: dict[int, HitRule] = {}
        """By slot, the rule of a holder whose layers do not all need every block."""
        self._by_rule: dict[int, dict[HitRule, int]] = {}
        """The lanes of each rule, by word. Made from `_rules`."""
        self._unswept: dict[int, int] = {}
        """Slots of removed holders, with the first row whose bit is not cleared yet."""
        self.dropped_blocks = 0

    @property
    def block_holders(self) -> int:
        """Triples of (block, holder, tier)."""
        return sum(self._held)

    @property
    def bytes(self) -> int:
        return sum(table.bytes for table in (self._table, self._next, self._previous) if table)

    def held(self, holder: PodId) -> int:
        """Pairs of (block, tier) of the holder."""
        slot = self._slots.get(holder)
        return 0 if slot is None else self._held[slot]

    def rename(self, old: PodId, new: PodId) -> None:
        """Move the blocks of `old` to `new` and drop the previous blocks of `new`. O(1)."""
        self.forget(new)
        slot = self._slots.pop(old, None)
        if slot is not None:
            self._assign(slot, new)

    def apply(self, holder: PodId, change: BlockChange) -> None:
        (self.add if change.held else self.remove)(holder, change.blocks, change.tier, change.layer)

    def follow(self, holder: PodId, rule: HitRule | None) -> None:
        """A hit on the holder is what this rule says; None: as long as it has every block."""
        self._set_rule(self._slot(holder), rule)

    def _set_rule(self, slot: int, rule: HitRule | None) -> None:
        if self._rules.pop(slot, None) is None and rule is None:
            return
        if rule is not None:
            self._rules[slot] = rule
        self._by_rule = {}
        for one, followed in self._rules.items():
            lanes = self._by_rule.setdefault(one // _LANES, {})
            lanes[followed] = lanes.get(followed, 0) | 1 << one % _LANES

    def add(self, holder: PodId, blocks: object, tier: Tier = Tier.GPU, layer: int = 0) -> None:
        """Add `blocks` in `tier` to the holder, which is created on first use. `layer`: the type of layers that has
        them, in the order of the holder's rule."""
        slot, hashes = self._slot(holder), as_hashes(blocks)
        if not len(hashes) or not self._make_room(len(hashes)):
            return
        rows = self._table.place(hashes)
        plane, bit = self._table.plane(_plane(slot, tier, layer)), _bit(slot)
        if self._previous is not None:
            cleared = _clear(self._previous, slot, hashes, tier, layer)
            self._held[slot] -= 0 if layer else cleared
        added = rows[plane.take(rows) & bit == 0]
        plane[added] |= bit
        self._held[slot] += 0 if layer else len(added)

    def remove(self, holder: PodId, blocks: object, tier: Tier = Tier.GPU, layer: int = 0) -> None:
        slot, hashes = self._slot(holder), as_hashes(blocks)
        if not len(hashes):
            return
        self._renew(len(hashes))
        for table in self._tables():
            cleared = _clear(table, slot, hashes, tier, layer)
            self._held[slot] -= 0 if layer else cleared

    def forget(self, holder: PodId) -> None:
        """Remove the holder and its blocks. O(1): its bits are cleared later, slice by slice."""
        slot = self._slots.pop(holder, None)
        if slot is not None:
            self._holders[slot] = None
            self._held[slot] = 0
            self._lanes[slot // _LANES] &= ~(1 << slot % _LANES)
            self._unswept[slot] = 0
            self._set_rule(slot, None)

    def walk(self, blocks: object, tokens: PromptTokens = (0, 1)) -> dict[PodId, BlocksByTier]:
        """Leading blocks of each holder of the first block; a block counts in its nearest tier. `tokens` matter to
        holders with a rule."""
        found: dict[PodId, BlocksByTier] = {}
        if not self._table.used and self._previous is None:
            return found
        hashes = as_hashes(blocks)
        if not len(hashes):
            return found
        rows = [(table, table.find(hashes)) for table in self._tables()]
        for word, lanes in enumerate(self._lanes):
            first = word * _TIERS
            ruled = self._by_rule.get(word)
            runs = (
                _runs(_tiers(rows, first, lanes)) if ruled is None else _ruled_runs(rows, first, lanes, ruled, tokens)
            )
            holders = self._holders[word * _LANES : (word + 1) * _LANES]
            for ending, counts in runs:
                while ending:
                    lane = ending & -ending
                    ending ^= lane
                    holder = holders[lane.bit_length() - 1]
                    assert holder is not None  # unused slots are masked
                    found[holder] = counts
        return found

    def full_and_hit(self, holder: PodId, blocks: object, tokens: PromptTokens) -> tuple[int, int]:
        """Leading blocks that the holder's full attention has, and those that its rule counts."""
        slot = self._slots.get(holder)
        hashes = as_hashes(blocks)
        if slot is None or not len(hashes):
            return 0, 0
        rows = [(table, table.find(hashes)) for table in self._tables()]
        first, lane = slot // _LANES * _TIERS, 1 << slot % _LANES
        full = [sum(counts) for _, counts in _runs(_tiers(rows, first, lane))] or [0]
        rule = self._rules.get(slot)
        hit = [sum(counts) for _, counts in _ruled_runs(rows, first, lane, {rule: lane}, tokens)] if rule else full
        return full[0], sum(hit)

    # --- slots ---

    def _slot(self, holder: PodId) -> int:
        """The holder's slot, assigned on first use."""
        slot = self._slots.get(holder)
        if slot is None:
            slot = self._free_slot()
            self._assign(slot, holder)
        return slot

    def _free_slot(self) -> int:
        """A slot without holder whose bits are all cleared, or a new one."""
        for slot, holder in enumerate(self._holders):
            if holder is None and slot not in self._unswept:
                return slot
        slot = len(self._holders)
        self._holders.append(None)
        self._held.append(0)
        if slot % _LANES == 0:
            self._lanes.append(0)
        return slot

    def _assign(self, slot: int, holder: PodId) -> None:
        self._slots[holder] = slot
        self._holders[slot] = holder
        self._lanes[slot // _LANES] |= 1 << slot % _LANES

    # --- tables ---

    def _tables(self) -> tuple[BlockTable, ...]:
        """The tables whose bits are valid."""
        return (self._table,) if self._previous is None else (self._table, self._previous)

    def _make_room(self, blocks: int) -> bool:
        """Continue the renewal. False if `blocks` more do not fit."""
        self._renew(blocks)
        for _ in range(2):
            if not self._is_renewing() and self._table.used + blocks > _RENEW_AT * self._table.capacity:
                self._begin_renewal(blocks)
            while not self._table.has_room_for(blocks) and self._is_renewing():
                self._renew(blocks, at_once=True)  # slices cannot keep up with the additions
            if self._table.has_room_for(blocks):
                return True
        self.dropped_blocks += blocks
        return False

    def _is_renewing(self) -> bool:
        return self._next is not None or self._previous is not None

    def _begin_renewal(self, more: int) -> None:
        """Allocate a table for the used rows with room to grow, unless `max_bytes` would make it as full again."""
        used = _used_rows(self._table) + more
        capacity = MIN_ROWS
        while capacity * _MAX_INITIAL_LOAD < used:
            capacity *= 2
        row_bytes = 8 * (1 + max(len(self._table.planes), 1))
        while self._max_bytes is not None and capacity > MIN_ROWS and capacity * row_bytes > self._max_bytes:
            capacity //= 2
        if used <= _RENEW_AT * capacity:
            self._next = BlockTable(capacity, self._table.planes, self._scatter)

    def _renew(self, blocks: int, *, at_once: bool = False) -> None:
        """Clear, move or sweep the next slice, in proportion to `blocks`, to finish before the table is full."""
        table = self._previous or self._next
        rows = table.capacity if at_once and table else max(SLICE_ROWS, 32 * blocks)
        if self._previous is not None:
            self._move(self._previous, rows)
        elif self._next is None:
            if self._unswept:
                self._sweep(rows)
        elif self._next.prepare(rows):
            self._previous, self._table, self._next = self._table, self._next, None
            self._moved_rows = 0

    def _move(self, previous: BlockTable, count: int) -> None:
        piece = slice(self._moved_rows, self._moved_rows + count)
        planes = {number: plane[piece] & self._used_lanes(number) for number, plane in previous.planes.items()}
        used = np.flatnonzero(np.bitwise_or.reduce(list(planes.values()))) if planes else np.array([], np.int64)
        if len(used):
            rows = self._table.place(previous.keys[piece][used])
            for number, bits in planes.items():
                self._table.plane(number)[rows] |= bits[used]
        for plane in previous.planes.values():
            plane[piece] = 0
        self._moved_rows += count
        if self._moved_rows >= previous.capacity:
            self._previous = None

    def _used_lanes(self, number: int) -> np.uint64:
        """The lanes of a plane whose slots are used."""
        return np.uint64(self._lanes[number % _LAYER // _TIERS])

    def _sweep(self, count: int) -> None:
        """Clear the bits of one removed holder in the next rows."""
        slot, start = next(iter(self._unswept.items()))
        for number, plane in self._table.planes.items():
            if number % _LAYER // _TIERS == slot // _LANES:
                plane[start : start + count] &= ~_bit(slot)
        self._unswept[slot] = start + count
        if self._unswept[slot] >= self._table.capacity:
            del self._unswept[slot]


def _plane(slot: int, tier: Tier, layer: int = 0) -> int:
    return layer * _LAYER + slot // _LANES * _TIERS + tier


def _bit(slot: int) -> np.uint64:
    return _ONE << np.uint64(slot % _LANES)


def _clear(table: BlockTable, slot: int, hashes: Hashes, tier: Tier, layer: int) -> int:
    """Clear the slot's bits of these blocks in one table. Returns the number of bits that were set."""
    plane = table.planes.get(_plane(slot, tier, layer))
    if plane is None:
        return 0
    rows = table.find(hashes)
    rows = rows[rows >= 0]
    held = rows[plane.take(rows) & _bit(slot) != 0]
    plane[held] &= ~_bit(slot)
    return len(held)


def _used_rows(table: BlockTable) -> int:
    """Estimated number of rows with a bit set, from a sample: the order of rows is random."""
    sample = slice(0, 1 << 16)
    if not table.planes:
        return 0
    used = np.count_nonzero(np.bitwise_or.reduce([plane[sample] for plane in table.planes.values()]))
    return int(used) * max(table.capacity >> 16, 1)


def _gather(found: list[tuple[BlockTable, Rows]], number: int, lanes: int) -> Bits | None:
    """The lanes that have each block, from all tables; None if no table has the plane."""
    gathered: Bits | None = None
    for table, rows in found:
        plane = table.planes.get(number)
        if plane is not None:
            bits = plane.take(rows, mode="clip") & np.uint64(lanes)
            bits[rows < 0] = 0
            gathered = bits if gathered is None else gathered | bits
    return gathered


def _tiers(found: list[tuple[BlockTable, Rows]], first: int, lanes: int) -> list[Bits | None]:
    """The same for the planes of all tiers."""
    return [_gather(found, first + tier, lanes) for tier in Tier] if lanes else []


def _in_any(tiers: list[Bits | None]) -> Bits | None:
    present = [bits for bits in tiers if bits is not None]
    return np.bitwise_or.reduce(present) if len(present) > 1 else next(iter(present), None)


def _runs(tiers: list[Bits | None]) -> Iterator[tuple[int, BlocksByTier]]:
    """(lanes, their leading blocks by tier), for all lanes that have the first block."""
    held = _in_any(tiers)
    if held is not None:
        yield from _counted(tiers, np.bitwise_and.accumulate(held))


def _ruled_runs(
    found: list[tuple[BlockTable, Rows]], first: int, lanes: int, ruled: Mapping[HitRule, int], tokens: PromptTokens
) -> Iterator[tuple[int, BlocksByTier]]:
    """The same where some lanes have a rule."""
    for rule, followers in ruled.items():
        lanes &= ~followers
        layers = [_tiers(found, layer * _LAYER + first, followers) for layer in range(len(rule.types))]
        held = [bits for bits in map(_in_any, layers) if bits is not None]
        if len(held) == len(layers):
            yield from _counted(layers[0], covered(rule, held, *tokens))
    if lanes:
        yield from _runs(_tiers(found, first, lanes))


def _counted(tiers: list[Bits | None], alive: Bits) -> Iterator[tuple[int, BlocksByTier]]:
    """(lanes, their leading blocks by tier), where `alive` has those that each block of the prompt counts for."""
    alive = alive[: np.count_nonzero(alive)]
    if not len(alive):
        return
    if tiers[0] is not None and not any(bits is not None for bits in tiers[1:]):
        yield from ((lanes, (depth, 0, 0, 0)) for depth, lanes in _ends(alive))
    else:
        yield from _runs_by_tier(tiers, alive)


def _ends(alive: Bits) -> Iterator[tuple[int, int]]:
    """(depth, lanes whose leading blocks end there). O(lanes)."""
    changes = np.flatnonzero(alive[1:] != alive[:-1])
    before = int(alive[0])
    for depth in changes.tolist():
        after = int(alive[depth + 1])
        yield depth + 1, before ^ after
        before = after
    yield len(alive), before


def _runs_by_tier(tiers: list[Bits | None], alive: Bits) -> Iterator[tuple[int, BlocksByTier]]:
    """Like `_runs`; each block counts in the first tier that has it."""
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
    """Number of words in which each of the 64 bits is set."""
    bits = np.unpackbits(words.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    sums: list[int] = bits.sum(axis=0, dtype=np.int64).tolist()
    return sums
