"""How does the cluster index lie in Redis?

Names of keys, rows and log entries, and nothing that talks to a server: `README.md` beside this file draws the whole
schema. Everything of one scope (a generation without adapter and salt, which stand in the block hashes) shares one
hash tag and thus one slot, so that scripts never cross slots.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import msgspec

from router.errors import ConfigError
from router.hashing import HASH_BYTES, generation_seed, hash_array
from router.index.cluster import EntryKind, LogEntry
from router.index.holders import HolderFacts
from router.types import BlockChange, BlockHash, Generation, Tier

VERSION = 1

Fields: TypeAlias = Mapping[bytes, bytes]


class Unreadable(Exception):
    """A row or entry that this version does not understand: skipped, counted, never guessed at."""


_BROKEN = (LookupError, ValueError, OverflowError, RecursionError)
"""Whatever reading may trip over; `msgspec.DecodeError` and `UnicodeDecodeError` are values' errors, too."""


@dataclass(frozen=True, slots=True)
class Keys:
    """All key names of one namespace."""

    namespace: str = "warmroute"

    def __post_init__(self) -> None:
        if not self.namespace or set(self.namespace) & set("{}*?[]\\ "):
            raise ConfigError(f"namespace {self.namespace!r} must not be empty or contain any of {{}}*?[]\\ or space")

    @property
    def scopes(self) -> str:
        """Sorted set: a generation as JSON, by the time of its last heartbeat."""
        return f"{self.namespace}:{VERSION}:scopes"

    @property
    def routers(self) -> str:
        """Hash: each router replica's work in flight, with the time at which it was written."""
        return f"{self.namespace}:{VERSION}:routers"

    @property
    def receipts(self) -> str:
        """Stream: receipts of the routers, for whoever wants to read them; nothing here does."""
        return f"{self.namespace}:{VERSION}:receipts"

    def holders(self, scope: str) -> str:
        """Sorted set: holder ids, by the time of their last heartbeat."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:holders"

    def holder(self, scope: str, holder: str) -> str:
        """Hash: the row of one holder; expires by itself."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:holder:{holder}"

    def blocks(self, scope: str, holder: str, epoch: int, tier: Tier) -> str:
        """Set: what the holder has in that tier, in that epoch; expires by itself."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:blocks:{holder}:{epoch}:{int(tier)}"

    def log(self, scope: str) -> str:
        """Stream: every change, in order."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:log"


# --- generations ---


def base_of(generation: Generation) -> Generation:
    """What all adapters and salts of a generation share."""
    return replace(generation, adapter="", salt="")


def scope_of(generation: Generation) -> str:
    """The scope in which a generation's blocks lie: 16 hex digits."""
    return f"{generation_seed(base_of(generation)):016x}"


def encode_generation(generation: Generation) -> bytes:
    """A generation as it stands in `scopes`."""
    return msgspec.json.encode(asdict(base_of(generation)), order="sorted")


def decode_generation(member: bytes) -> Generation:
    """Raises `Unreadable`."""
    try:
        return msgspec.json.decode(member, type=Generation)
    except _BROKEN as error:
        raise Unreadable(f"a generation that is none: {error}") from error


# --- blocks ---


def pack_blocks(blocks: Iterable[BlockHash]) -> bytes:
    """Hashes as little-endian u64, one after the other."""
    packed = hash_array(blocks)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_blocks(packed: bytes) -> array[int]:
    """Raises `Unreadable`."""
    if len(packed) % HASH_BYTES:
        raise Unreadable(f"{len(packed)} bytes are no blocks")
    blocks = hash_array()
    blocks.frombytes(packed)
    if sys.byteorder == "big":
        blocks.byteswap()
    return blocks


# --- rows and entries ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRow:
    """A holder as the registry has it. `blocks` by tier; `beat_s` by the server's clock."""

    epoch: int
    seq: int
    complete: bool
    owner: str
    beat_s: float
    blocks: tuple[int, ...]
    facts: HolderFacts


def encode_facts(facts: HolderFacts) -> bytes:
    """What a holder says of itself, as it stands in its row and in the entry of a new epoch."""
    return msgspec.json.encode(facts)


def decode_row(fields: Fields) -> HolderRow:
    """A holder's row. Raises `Unreadable`."""
    try:
        return HolderRow(
            epoch=int(fields[b"epoch"]),
            seq=int(fields[b"seq"]),
            complete=fields[b"complete"] == b"1",
            owner=fields[b"owner"].decode(),
            beat_s=int(fields[b"beat"]) / 1000,
            blocks=tuple(int(fields[b"n%d" % tier]) for tier in Tier),
            facts=msgspec.json.decode(fields[b"facts"], type=HolderFacts),
        )
    except _BROKEN as error:
        raise Unreadable(f"a holder's row that is none: {error!r}") from error


def decode_entry(fields: Fields) -> LogEntry:
    """One entry of the log. Raises `Unreadable`."""
    try:
        facts = fields.get(b"f")
        return LogEntry(
            kind=EntryKind(fields[b"k"].decode()),
            holder=fields[b"h"].decode(),
            epoch=int(fields[b"e"]),
            seq=int(fields[b"s"]),
            complete=fields.get(b"c", b"1") == b"1",
            facts=msgspec.json.decode(facts, type=HolderFacts) if facts else None,
            changes=tuple(_changes(fields)),
        )
    except _BROKEN as error:
        raise Unreadable(f"a log entry that is none: {error!r}") from error


def _changes(fields: Fields) -> Iterable[BlockChange]:
    for tier in Tier:
        for held, name in ((False, b"-%d" % tier), (True, b"+%d" % tier)):
            if packed := fields.get(name):
                yield BlockChange(tier, held, unpack_blocks(packed))
