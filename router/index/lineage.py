"""Which earlier prompt does this one continue, and did others start like it?

Each prompt of a conversation extends the previous one and thus contains its last full block. Prefixes that
conversations share (a document, a system prompt) are stored at power-of-two depths only. Both tables are bounded and
evict the oldest entries. This file stores hashes only, not where blocks are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from router.types import BlockHash

Ends: TypeAlias = tuple[int, int]
"""The nearest and the farthest end of a prompt after a marker, in blocks."""
NO_ENDS = 1 << 62, -1
"""The ends of a marker after which no prompt ended: the nearest is beyond every prompt, the farthest before it."""
CONVERSATIONS = 8192
"""Maximum conversations whose last prompt is stored: about 2 MB."""
MAX_DEPTH_MARKERS = 65536
"""Maximum stored prompt starts, about ten per prompt: about 8 MB. Eviction leaves at least half."""
MAX_GROWTH_BLOCKS = 256
"""A prompt that grew by more than this is not recognised; limits the cost of the search."""


class Ancestry(msgspec.Struct, frozen=True, gc=False):
    """A prompt's history. `turn`: number of previous prompts of the conversation. `gap_s`: mean time between them.
    `shared_blocks`: leading blocks shared with other prompts, rounded down to a power of two; first turns only."""

    turn: int = 0
    gap_s: float = 0.0
    shared_blocks: int = 0


class _Last(msgspec.Struct, frozen=True, gc=False):
    """The last prompt of a conversation."""

    at_s: float
    turn: int
    gap_s: float


_UNKNOWN = Ancestry()


class Lineage:
    """The last prompts of recent conversations and the starts of recent prompts."""

    def __init__(self) -> None:
        self._tails: OrderedDict[BlockHash, _Last] = OrderedDict()
        self._depth_markers: dict[BlockHash, Ends] = {}
        """Hashes of recent prompts at power-of-two depths, and how many blocks after the marker prompts ended. At half
        of `MAX_DEPTH_MARKERS`, this table becomes `_older_depth_markers`."""
        self._older_depth_markers: dict[BlockHash, Ends] = {}

    def __len__(self) -> int:
        return len(self._tails) + len(self._depth_markers | self._older_depth_markers)

    def observe(self, hashes: Sequence[BlockHash], now_s: float, global_prefix_blocks: int = 0) -> Ancestry:
        """Record a prompt and return its history. `global_prefix_blocks`: leading blocks that all traffic shares.

        O(min(blocks, MAX_GROWTH_BLOCKS))."""
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

    def peek(self, hashes: Sequence[BlockHash], now_s: float, global_prefix_blocks: int = 0) -> Ancestry:
        """The history that `observe` would return, without recording the prompt."""
        return self._ancestry(hashes, now_s, global_prefix_blocks)[0] if hashes else _UNKNOWN

    def _ancestry(
        self, hashes: Sequence[BlockHash], now_s: float, global_prefix_blocks: int
    ) -> tuple[Ancestry, BlockHash | None]:
        """The history, and the last block of the prompt that this one continues."""
        blocks, shared = len(hashes), self._shared(hashes)
        if not shared:
            return _UNKNOWN, None
        # The previous prompt reached this marker but not the next one, which is twice as deep.
        marker = hashes[shared - 1]
        nearest, farthest = self._depth_markers.get(marker, NO_ENDS)
        if older := self._older_depth_markers.get(marker):
            nearest, farthest = min(nearest, older[0]), max(farthest, older[1])
        first = max(global_prefix_blocks, blocks - MAX_GROWTH_BLOCKS, shared - 1, shared - 1 + nearest)
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
        """Add the missing markers, from the deepest up: a marker implies all shallower ones."""
        depth_markers, deepest = self._depth_markers, _deepest_marker(hashes)
        depth = deepest
        while depth and (marker := hashes[depth - 1]) not in depth_markers:
            depth_markers[marker] = NO_ENDS
            depth >>= 1
        last, after = hashes[deepest - 1], len(hashes) - deepest
        nearest, farthest = depth_markers[last]
        depth_markers[last] = min(nearest, after), max(farthest, after)
        if len(depth_markers) > MAX_DEPTH_MARKERS // 2:
            self._older_depth_markers, self._depth_markers = depth_markers, {}


def _deepest_marker(hashes: Sequence[BlockHash]) -> int:
    """Depth of the deepest marker in blocks: the largest power of two that fits; 0 without blocks."""
    return 1 << len(hashes).bit_length() >> 1
