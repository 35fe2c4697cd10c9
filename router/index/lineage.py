"""Which earlier prompt does this one go on from, and did others begin like it?

A conversation repeats all that was said and adds to it: the last full block of its previous prompt is inside the next
one. What prompts share beside that (a document, a system prompt) is remembered at a few depths alone. Both memories are
bounded, oldest out first. This file holds hashes only; it never says where a block lies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from router.types import BlockHash

CONVERSATIONS = 8192
"""Last prompts that are remembered: about 2 MB."""
DOORS = 32768
"""Shared beginnings that are remembered: about 5 MB."""
REACH_BLOCKS = 256
"""A prompt that grew by more than this is not recognised: what the search costs at most."""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """What is known of a prompt's past. `turn` counts the prompts that it goes on from, `gap_s` is the mean time
    between them. `shared_blocks` of a first turn were seen at the head of others: rounded down to a power of two."""

    turn: int = 0
    gap_s: float = 0.0
    shared_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Last:
    at_s: float
    turn: int
    gap_s: float


_UNKNOWN = Ancestry()


class Lineage:
    """The last prompt of every conversation, and the beginnings of all."""

    def __init__(self) -> None:
        self._tails: OrderedDict[BlockHash, _Last] = OrderedDict()
        self._doors: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tails) + len(self._doors)

    def observe(self, hashes: Sequence[BlockHash], now_s: float, everybodys: int = 0) -> Ancestry:
        """Take note of a prompt. `everybodys`: leading blocks that say nothing because all traffic has them.

        O(min(blocks, REACH_BLOCKS))."""
        blocks = len(hashes)
        if not blocks:
            return _UNKNOWN
        found = self._continued(hashes[max(everybodys, blocks - REACH_BLOCKS) : -1], now_s)
        shared = self._shared(hashes)
        if found is None:
            found = Ancestry(0, 0.0, shared if shared > everybodys else 0)
        self._tails[hashes[-1]] = _Last(now_s, found.turn, found.gap_s)
        if len(self._tails) > CONVERSATIONS:
            self._tails.popitem(last=False)
        return found

    def _continued(self, inner: Sequence[BlockHash], now_s: float) -> Ancestry | None:
        """The latest prompt that ended there; it is not the last of its conversation any more."""
        tail = next(filter(self._tails.__contains__, reversed(inner)), None)
        if tail is None:
            return None
        last = self._tails.pop(tail)
        turn = last.turn + 1
        return Ancestry(turn, last.gap_s + (now_s - last.at_s - last.gap_s) / turn)

    def _shared(self, hashes: Sequence[BlockHash]) -> int:
        doors, depth, shared = self._doors, 1, 0
        while depth <= len(hashes):
            block = hashes[depth - 1]
            if block in doors:
                shared = depth
                doors.move_to_end(block)
            else:
                doors[block] = None
            depth *= 2
        while len(doors) > DOORS:
            doors.popitem(last=False)
        return shared
