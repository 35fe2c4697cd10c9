"""Which earlier prompt does this one go on from, and did others begin like it?

A conversation repeats all that was said and adds to it: the last full block of its previous prompt is inside the next
one. What prompts share beside that (a document, a system prompt) is remembered at a few depths alone. Both memories are
bounded, oldest out first. This file holds hashes only; it never says where a block lies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from router.types import BlockHash

CONVERSATIONS = 8192
"""Last prompts that are remembered: about 2 MB."""
MAX_DEPTH_MARKERS = 65536
"""Beginnings that are remembered, some ten of each prompt, between half and all of so many: about 8 MB."""
REACH_BLOCKS = 256
"""A prompt that grew by more than this is not recognised: what the search costs at most."""


class Ancestry(msgspec.Struct, frozen=True, gc=False):
    """What is known of a prompt's past. `turn` counts the prompts that it goes on from, `gap_s` is the mean time
    between them. `shared_blocks` of a first turn were seen at the head of others: rounded down to a power of two."""

    turn: int = 0
    gap_s: float = 0.0
    shared_blocks: int = 0


class _Last(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    turn: int
    gap_s: float


_UNKNOWN = Ancestry()


class Lineage:
    """The last prompt of every conversation, and the beginnings of all."""

    def __init__(self) -> None:
        self._tails: OrderedDict[BlockHash, _Last] = OrderedDict()
        self._depth_markers: dict[BlockHash, int] = {}
        """Hashes at power-of-two depths of recent prompts. Value: a bit for each number of blocks after the marker at
        which a prompt ended. At half of `MAX_DEPTH_MARKERS` this table becomes the older one."""
        self._older_depth_markers: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._tails) + len(self._depth_markers | self._older_depth_markers)

    def observe(self, hashes: Sequence[BlockHash], now_s: float, global_prefix_blocks: int = 0) -> Ancestry:
        """Take note of a prompt. `global_prefix_blocks`: leading blocks that say nothing because all traffic has them.

        O(min(blocks, REACH_BLOCKS))."""
        if not hashes:
            return _UNKNOWN
        found, before = self._ancestry(hashes, now_s, global_prefix_blocks)
        if before is not None:
            del self._tails[before]
        self._tails[hashes[-1]] = _Last(now_s, found.turn, found.gap_s)
        if len(self._tails) > CONVERSATIONS:
            self._tails.popitem(last=False)
        self._mark_depths(hashes)
        return found

    def apply_remote(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Record a prompt of another worker. Idempotent."""
        if hashes and hashes[-1] not in self._tails:
            self.observe(hashes, now_s)

    def look(self, hashes: Sequence[BlockHash], now_s: float, global_prefix_blocks: int = 0) -> Ancestry:
        """What `observe` would say, without taking note."""
        return self._ancestry(hashes, now_s, global_prefix_blocks)[0] if hashes else _UNKNOWN

    def _ancestry(
        self, hashes: Sequence[BlockHash], now_s: float, global_prefix_blocks: int
    ) -> tuple[Ancestry, BlockHash | None]:
        """And the end of the latest prompt that it goes on from."""
        blocks, shared = len(hashes), self._shared(hashes)
        if not shared:
            return _UNKNOWN, None
        # What it goes on from reached as deep as was seen, and not twice as deep: there would be another marker.
        marker = hashes[shared - 1]
        ends = self._depth_markers.get(marker, 0) | self._older_depth_markers.get(marker, 0)
        nearest, farthest = (ends & -ends).bit_length() - 1, ends.bit_length() - 1
        first = max(global_prefix_blocks, blocks - REACH_BLOCKS, shared - 1, shared - 1 + nearest)
        end = min(shared + farthest, blocks - 1)
        before = next(filter(self._tails.__contains__, reversed(hashes[first:end])), None) if first < end else None
        if before is None:
            return (Ancestry(0, 0.0, shared) if shared > global_prefix_blocks else _UNKNOWN), None
        last = self._tails[before]
        turn = last.turn + 1
        return Ancestry(turn, last.gap_s + (now_s - last.at_s - last.gap_s) / turn), before

    def _shared(self, hashes: Sequence[BlockHash]) -> int:
        """The depth of the deepest marker that is set."""
        depth_markers, older, depth = self._depth_markers, self._older_depth_markers, _deepest_marker(hashes)
        while depth and (marker := hashes[depth - 1]) not in depth_markers and marker not in older:
            depth >>= 1
        return depth

    def _mark_depths(self, hashes: Sequence[BlockHash]) -> None:
        """Whoever came through one came through all before it: from the deepest on, as far as they were closed."""
        depth_markers, deepest = self._depth_markers, _deepest_marker(hashes)
        depth = deepest
        while depth and (marker := hashes[depth - 1]) not in depth_markers:
            depth_markers[marker] = 0
            depth >>= 1
        depth_markers[hashes[deepest - 1]] |= 1 << len(hashes) - deepest
        if len(depth_markers) > MAX_DEPTH_MARKERS // 2:
            self._older_depth_markers, self._depth_markers = depth_markers, {}


def _deepest_marker(hashes: Sequence[BlockHash]) -> int:
    """Its depth in blocks: the largest power of two that fits; 0 without blocks."""
    return 1 << len(hashes).bit_length() >> 1
