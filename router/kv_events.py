"""What holders announce about their blocks. `types.py` exports all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class Tier(IntEnum):
    """Where a block is stored, nearest first. The value is the index in tuples by tier."""

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """A holder stored these blocks. `tokens` are those of all blocks, concatenated. Without tokens (and with
    `block_size_tokens` 0) it is a tier update of hashes that the holder announced before."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None = None
    tokens: Sequence[int] = ()
    block_size_tokens: int = 0
    tier: Tier = Tier.GPU
    group: int = 0
    adapter: str = ""
    salt: str = ""


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
