"""A cache tier of whole blocks under a virtual clock, which evicts by any value.

The blocks of a prompt that no later prompt used are one segment: they have the same age. A tier evicts segments with
the least value first, each from its end, and never a block before those that continue it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

from loadtest.studies.reuse_value import AGES_S, ReuseValue, age_bucket, class_of

MAX_FOLLOWED = 8192
"""Prompts whose reuse is learnt, as many as the router remembers."""
LEARN_EVERY_S = 60.0


class Prompt(NamedTuple):
    """A prompt of whole blocks at a time; `tokens` with those behind the last whole block."""

    at_s: float
    blocks: Sequence[int]
    tokens: int


@dataclass(eq=False, slots=True)
class Segment:
    """The blocks [first, end) of a prompt are cached, and used by no later one."""

    prompt: Prompt
    turn: int
    cls: int
    first: int
    end: int
    uses: int = 1
    value: float = 0.0
    """For policies that set a value at each use."""
    unused: float = 1.0
    """Share of the prompt that no later one used, whether cached or not."""
    bucket: int = 0
    """Age up to which it was counted."""

    def age_s(self, now_s: float) -> float:
        """Time since the use of the blocks."""
        return now_s - self.prompt.at_s


Values: TypeAlias = Callable[[Sequence[Segment], float], Sequence[float]]
"""The values of segments at a time."""


@dataclass(slots=True)
class CacheTier:
    """`serve` prompts in the order of time. `order_s` > 0: the tier itself evicts by age, and every `order_s` seconds
    an order makes it evict by value until `headroom` of it is free."""

    capacity_blocks: int
    values: Values
    reuse: ReuseValue
    order_s: float = 0.0
    headroom: float = 0.0
    class_of: Callable[[int, float], int] = class_of
    evicted: Callable[[float], object] = float
    """Called with the value of each evicted segment."""
    used_blocks: int = 0
    _owner: dict[int, Segment] = field(default_factory=dict)
    """The latest segment with each block, cached or not: what the router remembers of conversations."""
    _cached: list[Segment] = field(default_factory=list)
    _followed: deque[Segment] = field(default_factory=lambda: deque(maxlen=MAX_FOLLOWED))
    _learn_at_s: float = LEARN_EVERY_S
    _order_at_s: float = 0.0

    def serve(self, prompt: Prompt) -> int:
        """Add a prompt. Returns its cached leading blocks."""
        cached, known = self._match(prompt.blocks)
        before = self._owner[prompt.blocks[known - 1]] if known else None
        self._take(prompt, known)
        self._add(prompt, known, before)
        self._learn(prompt.at_s)
        if self.order_s and prompt.at_s >= self._order_at_s:
            self._order_at_s = prompt.at_s + self.order_s
            self._evict(int(self.capacity_blocks * (1 - self.headroom)), prompt.at_s, self.values)
        self._evict(self.capacity_blocks, prompt.at_s, by_recency if self.order_s else self.values)
        return cached

    def _match(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Leading blocks that are cached, and that are known."""
        known = next((at for at, block in enumerate(blocks) if block not in self._owner), len(blocks))
        cached = next((at for at in range(known) if at >= self._owner[blocks[at]].end), known)
        return cached, known

    def _take(self, prompt: Prompt, known: int) -> None:
        """Take the known blocks from the segments of earlier prompts."""
        at = 0
        while at < known:
            owner, first = self._owner[prompt.blocks[at]], at
            while at < known and self._owner[prompt.blocks[at]] is owner:
                at += 1
            self._count(owner, prompt.at_s)
            share = min((at - first) / len(owner.prompt.blocks), owner.unused)
            owner.unused -= share
            self.reuse.used(owner.cls, owner.bucket, share)
            self.used_blocks -= max(min(at, owner.end) - max(first, owner.first), 0)
            owner.first = at

    def _add(self, prompt: Prompt, known: int, before: Segment | None) -> None:
        turn, interval_s, uses = 0, 0.0, 1
        if before is not None and known >= max(len(before.prompt.blocks) - 1, 2):
            turn, interval_s, uses = before.turn + 1, before.age_s(prompt.at_s), before.uses + 1
        segment = Segment(prompt, turn, self.class_of(turn, interval_s), 0, len(prompt.blocks), uses)
        self._owner.update(dict.fromkeys(prompt.blocks, segment))
        self._cached.append(segment)
        self._followed.append(segment)
        self.reuse.reached(segment.cls, 0, 1, 1.0)
        self.used_blocks += len(prompt.blocks)

    def _count(self, segment: Segment, now_s: float) -> None:
        """Count the ages that a segment has reached."""
        bucket = age_bucket(segment.age_s(now_s))
        if bucket > segment.bucket:
            self.reuse.reached(segment.cls, segment.bucket + 1, bucket + 1, segment.unused)
            segment.bucket = bucket

    def _learn(self, now_s: float) -> None:
        if now_s < self._learn_at_s:
            return
        self._learn_at_s = now_s + LEARN_EVERY_S
        for segment in self._followed:
            self._count(segment, now_s)
        while self._followed and self._followed[0].bucket == len(AGES_S) - 1:
            self._followed.popleft()
        self.reuse.learn()

    def _evict(self, limit_blocks: int, now_s: float, values: Values) -> None:
        """Evict until `limit_blocks` are used: leaves first, those that free others join in."""
        if self.used_blocks <= limit_blocks:
            return
        self._cached = [one for one in self._cached if one.first < one.end]
        given = values(self._cached, now_s)
        rank_of = {one: (value, number) for number, (one, value) in enumerate(zip(self._cached, given, strict=True))}
        continued = self._continued()
        queue = [(*rank, one) for one, rank in rank_of.items()]
        heapify(queue)
        while queue and self.used_blocks > limit_blocks:
            value, _, one = heappop(queue)
            if one.first >= one.end:
                continue
            floor = max([one.first, *continued.get(one, ())])
            taken = min(max(one.end - floor, 0), self.used_blocks - limit_blocks)
            one.end -= taken
            self.used_blocks -= taken
            if taken:
                self.evicted(value)
            if one.first < one.end or not one.first:
                continue
            below = self._owner[one.prompt.blocks[one.first - 1]]
            continued[below].remove(one.first)
            heappush(queue, (*rank_of[below], below))

    def _continued(self) -> dict[Segment, list[int]]:
        """Where cached segments continue others, by the other: blocks before that place cannot be evicted."""
        found: dict[Segment, list[int]] = {}
        for one in self._cached:
            if one.first:
                found.setdefault(self._owner[one.prompt.blocks[one.first - 1]], []).append(one.first)
        return found


def by_recency(segments: Sequence[Segment], _now_s: float) -> list[float]:
    """LRU."""
    return [one.prompt.at_s for one in segments]
