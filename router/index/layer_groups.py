"""Which blocks do the groups of layers hold that keep only some: windows and states?

Their events name blocks by engine hash alone, in front of or behind the event of full attention that says what the
block is. A type of layers holds a block when all of its groups do. This file knows engine hashes, not the router's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from router.index.layers import MAX_TYPES, HitRule
from router.types import AttentionKind, LayerType, Tier

MAX_GROUPS = 64
"""Groups of one holder. The largest known model has 13."""
MAX_BEFORE_JOIN = 4096
"""Once this number of blocks is stored, a new group is none of the model's."""

HashInTier: TypeAlias = tuple[int, Tier]
"""An engine hash in a tier."""


class LayerGroups:
    """The groups of one holder next to full attention. Types are numbered from 1: 0 is full attention."""

    def __init__(self) -> None:
        self._types: list[LayerType] = []
        self._all_groups: list[int] = []
        """By type, a bit for each of its groups."""
        self._groups: dict[int, tuple[int, int]] = {}
        """By group, its type and its bit."""
        self._held: dict[HashInTier, int] = {}
        """The bits of the groups that hold a block."""
        self._more = Counter[tuple[int, int, Tier]]()
        """By group and place, the copies beyond the first."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, engine_hash: int) -> bool:
        return any((engine_hash, tier) in self._held for tier in Tier)

    def block_tokens(self, layer: int) -> int:
        return self._types[layer - 1].block_tokens

    def rule(self, full_tokens: int) -> HitRule:
        """What a hit needs where the blocks of full attention have `full_tokens`; 0: there is none."""
        full = (LayerType(AttentionKind.FULL, full_tokens),) if full_tokens else ()
        return HitRule.of((*full, *self._types), groups=len(full) + len(self._groups))

    def layer_of(self, group: int) -> int:
        """The type of a group; 0 if it is not known."""
        return self._groups[group][0] if group in self._groups else 0

    def join(self, group: int, layers: LayerType | None) -> tuple[int, list[HashInTier]] | None:
        """Learn a group. Returns the type that it belongs to, and what this type does not hold any more, because the
        new group does not have it. None if the group is ignored."""
        if group in self._groups:
            return self._groups[group][0], []
        if layers is None or len(self._groups) >= MAX_GROUPS or len(self._held) > MAX_BEFORE_JOIN:
            return None
        if layers not in self._types:
            if len(self._types) == MAX_TYPES:
                return None
            self._types.append(layers)
            self._all_groups.append(0)
        layer = 1 + self._types.index(layers)
        lost = [place for place in self._held if self._holds(place, layer)]
        self._groups[group] = layer, 1 << len(self._groups)
        self._all_groups[layer - 1] |= self._groups[group][1]
        return layer, lost

    def store(self, group: int, hashes: Iterable[int], tier: Tier) -> Iterator[int]:
        """The engine hashes that the group's type holds now."""
        layer, bit = self._groups[group]
        for engine_hash in hashes:
            place = engine_hash, tier
            held = self._held.get(place, 0)
            if held & bit:
                self._more[group, engine_hash, tier] += 1
                continue
            self._held[place] = held | bit
            if self._holds(place, layer):
                yield engine_hash

    def remove(self, group: int, hashes: Iterable[int], tier: Tier) -> Iterator[int]:
        """The engine hashes that the group's type does not hold any more."""
        layer, bit = self._groups[group]
        for engine_hash in hashes:
            place = engine_hash, tier
            held = self._held.get(place, 0)
            if not held & bit:
                continue
            if more := self._more.pop((group, engine_hash, tier), 0):
                if more > 1:
                    self._more[group, engine_hash, tier] = more - 1
                continue
            if self._holds(place, layer):
                yield engine_hash
            if held == bit:
                del self._held[place]
            else:
                self._held[place] = held & ~bit

    def layers_of(self, engine_hash: int) -> Iterator[tuple[int, Tier]]:
        """The types, with the tier, that hold a block."""
        for tier in Tier:
            if (engine_hash, tier) in self._held:
                for layer in range(1, 1 + len(self._types)):
                    if self._holds((engine_hash, tier), layer):
                        yield layer, tier

    def _holds(self, place: HashInTier, layer: int) -> bool:
        groups = self._all_groups[layer - 1]
        return groups > 0 and self._held.get(place, 0) & groups == groups


def unnamed(
    hashes: Sequence[int], named: Mapping[int, int], each: int, is_first: bool, drops_block: bool
) -> Iterator[tuple[int, int]]:
    """Which blocks are those of a window that full attention does not name, because its own blocks are larger? Pairs of
    hash and number of the block. `named`: the numbers of the others, every `each`-th.

    Blocks are kept in runs, which end with a named one or, where a drafter drops a block, one behind it. `is_first`:
    `hashes` and `named` begin with the same block."""
    places = [named.get(one, -1) for one in hashes]
    for at in range(len(places) - 1, 0, -1):
        if drops_block and places[at] < 0 <= places[at - 1]:
            places[at] = places[at - 1] + 1
    for at in range(len(places) - 2, -1, -1):
        if places[at] < 0 < places[at + 1] and places[at + 1] % each:
            places[at] = places[at + 1] - 1
    if is_first and places and places[0] < 0:
        places[0] = 0
    yield from ((one, place) for one, place in zip(hashes, places, strict=True) if place >= 0 and one not in named)
