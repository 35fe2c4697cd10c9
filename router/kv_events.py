"""What holders announce about their blocks. `types.py` exports all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias

import msgspec


class Tier(IntEnum):
    """Where a block is stored, nearest first. The value is the index in tuples by tier."""

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


class AttentionKind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    CHUNK = "chunk"


class LayerType(msgspec.Struct, frozen=True, order=True, gc=False):
    """Groups of layers that an engine keeps in the same way: they hold a block if each of them does.

    `span_tokens`: the length of the window or chunk. `drops_block`: a drafter (EAGLE, MTP) computes the last block of a
    hit again."""

    kind: AttentionKind
    block_tokens: int
    span_tokens: int = 0
    drops_block: bool = False

    @property
    def needed_blocks(self) -> int:
        """Blocks in a row that a hit needs at its end; for full attention, all in front of it as well."""
        return max(1, math.ceil((self.span_tokens - 1) / self.block_tokens)) if self.kind is AttentionKind.WINDOW else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """A holder stored these blocks. `tokens` are those of all blocks, concatenated. Without tokens (and with
    `block_size_tokens` 0) it is a tier update of hashes that the holder announced before.

    `layers`: those that the group has; None for full attention. Others keep only some of the blocks that have been
    computed, and name them by hash alone.

    `lookahead_tokens`: of each block, the tokens behind it that its hash includes (vLLM 0.33 with EAGLE or MTP); empty
    where hashes include none."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None = None
    tokens: Sequence[int] = ()
    lookahead_tokens: Sequence[tuple[int, ...]] = ()
    block_size_tokens: int = 0
    tier: Tier = Tier.GPU
    group: int = 0
    adapter: str = ""
    salt: str = ""
    layers: LayerType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """A holder removed one physical copy of each of these blocks."""

    block_hashes: tuple[int, ...]
    tier: Tier = Tier.GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """A holder cleared its whole cache."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
