"""The layout of the cluster index in Redis: keys, rows and log entries. `README.md` describes the whole schema.

All keys of a scope (a generation without adapter and salt, which are part of the block hashes) share one hash tag and
thus one slot, so that scripts do not cross slots. This file does no I/O.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import msgspec

from router.errors import ConfigError
from router.guards import Bound
from router.hashing import HASH_BYTES, generation_seed, hash_array
from router.index.cluster import EntryKind, LogEntry
from router.index.holders import HolderFacts
from router.index.layers import MAX_TYPES
from router.policy.calibration import VERSION as CALIBRATION_VERSION
from router.types import BlockChange, BlockHash, Generation, Tier

VERSION = 1
HOLDERS = Bound("holders", 512, 2048)
"""`max_bytes` is the size of one id."""

BlockPlace: TypeAlias = tuple[Tier, int]
"""A tier, and the number of a type of layers."""
Fields: TypeAlias = Mapping[bytes, bytes]


class Unreadable(Exception):
    """A row or entry that this version cannot decode."""


_DECODE_ERRORS = (LookupError, ValueError, OverflowError, RecursionError)
"""`msgspec.DecodeError` and `UnicodeDecodeError` are subclasses of `ValueError`."""


@dataclass(frozen=True, slots=True)
class Keys:
    namespace: str = "warmroute"

    def __post_init__(self) -> None:
        if not self.namespace or set(self.namespace) & set("{}*?[]\\ "):
            raise ConfigError(f"namespace {self.namespace!r} must not be empty or contain any of {{}}*?[]\\ or space")

    @property
    def scopes(self) -> str:
        """Sorted set: generations as JSON, by time of the last heartbeat."""
        return f"{self.namespace}:{VERSION}:scopes"

    @property
    def routers(self) -> str:
        """Hash: requests in flight by router replica, with the time of writing; expires."""
        return f"{self.namespace}:{VERSION}:routers"

    def calibration(self, model: str) -> str:
        """String: fitted speeds of all routers, in this version of them; expires."""
        return f"{self.namespace}:{VERSION}:calibration:{CALIBRATION_VERSION}:{model}"

    @property
    def drains(self) -> str:
        """String: the drains of operators, by selector. It does not expire."""
        return f"{self.namespace}:{VERSION}:drains"

    @property
    def quota_members(self) -> str:
        """Hash: processes that share quotas, with the time of their last report."""
        return f"{self.namespace}:{VERSION}:{{quotas}}:members"

    def quota(self, meter: str) -> str:
        """Hash: by process, what it has used of a limit and may use, with the time of the report; expires."""
        return f"{self.namespace}:{VERSION}:{{quotas}}:meter:{meter}"

    def response(self, response_id: str) -> str:
        """String: pod and model of a stored response; expires."""
        return f"{self.namespace}:{VERSION}:response:{response_id}"

    def holders(self, scope: str) -> str:
        """Sorted set: holder ids, by time of the last heartbeat."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:holders"

    def holder(self, scope: str, holder: str) -> str:
        """Hash: the row of one holder; expires."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:holder:{holder}"

    def blocks(self, scope: str, holder: str, epoch: int, tier: Tier, layer: int = 0) -> str:
        """Set: the holder's blocks in a tier and epoch, in the layers of this type; expires."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:blocks:{holder}:{epoch}:{place_name(tier, layer)}"

    def log(self, scope: str) -> str:
        """Stream: all changes, in order."""
        return f"{self.namespace}:{VERSION}:{{{scope}}}:log"


# --- generations ---


def base_of(generation: Generation) -> Generation:
    return replace(generation, adapter="", salt="")


def scope_of(generation: Generation) -> str:
    """The scope of a generation: 16 hex digits."""
    return f"{generation_seed(base_of(generation)):016x}"


def encode_generation(generation: Generation) -> bytes:
    return msgspec.json.encode(asdict(base_of(generation)), order="sorted")


def decode_generation(member: bytes) -> Generation:
    """Decode a member of `scopes`. Raises `Unreadable`."""
    try:
        return msgspec.json.decode(member, type=Generation)
    except _DECODE_ERRORS as error:
        raise Unreadable(f"invalid generation: {error}") from error


# --- blocks ---


def place_name(tier: Tier, layer: int) -> str:
    """The name of a tier and a type of layers in keys and fields. Full attention has that of the tier, so that versions
    which do not know the other types read full attention and nothing else."""
    return f"{int(tier)}.{layer}" if layer else str(int(tier))


_CHANGE_FIELDS = [
    (tier, layer, held, f"{'+' if held else '-'}{place_name(tier, layer)}".encode())
    for tier in Tier
    for layer in range(1 + MAX_TYPES)
    for held in (False, True)
]


def pack_blocks(blocks: Iterable[BlockHash]) -> bytes:
    """Concatenated little-endian u64 hashes."""
    packed = hash_array(blocks)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_blocks(packed: bytes) -> array[int]:
    """The hashes in `packed`. Raises `Unreadable`."""
    if len(packed) % HASH_BYTES:
        raise Unreadable(f"invalid blocks: {len(packed)} bytes is not a multiple of {HASH_BYTES}")
    blocks = hash_array()
    blocks.frombytes(packed)
    if sys.byteorder == "big":
        blocks.byteswap()
    return blocks


# --- rows and entries ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRow:
    """A holder's row. `blocks`: count by tier; `beat_s`: last heartbeat by the server's clock."""

    epoch: int
    seq: int
    complete: bool
    owner: str
    beat_s: float
    blocks: tuple[int, ...]
    facts: HolderFacts


ROW_FIELDS = (b"epoch", b"seq", b"complete", b"owner", b"beat", *(b"n%d" % tier for tier in Tier), b"facts")
"""What `decode_row` needs."""


def decode_row(fields: Fields) -> HolderRow:
    """Decode a holder's row. Raises `Unreadable`."""
    try:
        return HolderRow(
            epoch=_count(fields[b"epoch"]),
            seq=_count(fields[b"seq"]),
            complete=fields[b"complete"] == b"1",
            owner=fields[b"owner"].decode(),
            beat_s=_count(fields[b"beat"]) / 1000,
            blocks=tuple(_count(fields[b"n%d" % tier]) for tier in Tier),
            facts=msgspec.json.decode(fields[b"facts"], type=HolderFacts),
        )
    except _DECODE_ERRORS as error:
        raise Unreadable(f"invalid holder row: {error!r}") from error


def decode_entry(fields: Fields) -> LogEntry:
    """Decode a log entry. Raises `Unreadable`."""
    try:
        facts = fields.get(b"f")
        return LogEntry(
            kind=EntryKind(fields[b"k"].decode()),
            holder=_holder(fields[b"h"]),
            epoch=_count(fields[b"e"]),
            seq=_count(fields[b"s"]),
            complete=fields.get(b"c", b"1") == b"1",
            facts=msgspec.json.decode(facts, type=HolderFacts) if facts else None,
            changes=tuple(_changes(fields)),
        )
    except _DECODE_ERRORS as error:
        raise Unreadable(f"invalid log entry: {error!r}") from error


def _holder(name: bytes) -> str:
    """The id of a holder. Raises `OutOfBounds`."""
    HOLDERS.check_size(len(name))
    return name.decode()


def _count(digits: bytes) -> int:
    """A number of at most 16 digits, which microseconds since 1970 have. Raises `ValueError`."""
    if len(digits) > 16 or not digits.isdigit():
        raise ValueError(f"number out of range: {digits[:32]!r}")
    return int(digits)


def _changes(fields: Fields) -> Iterable[BlockChange]:
    for tier, layer, held, name in _CHANGE_FIELDS:
        if packed := fields.get(name):
            yield BlockChange(tier, held, unpack_blocks(packed), layer)
