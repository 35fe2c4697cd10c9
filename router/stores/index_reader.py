"""Reads the cluster index from Redis: generations, holders, blocks and the log.

Entries that this version cannot decode are skipped with a warning, and so is what exceeds a bound: Redis does not even
send it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from itertools import product
from typing import TypeVar, cast

from router.guards import Bound
from router.index.cluster import LogEntry
from router.index.holders import HolderId
from router.index.layers import MAX_TYPES
from router.stores.logged_once import TOO_LARGE, LoggedOnce
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import (
    HOLDERS,
    ROW_FIELDS,
    HolderRow,
    Keys,
    Unreadable,
    decode_entry,
    decode_generation,
    decode_row,
    encode_generation,
    scope_of,
    unpack_blocks,
)
from router.stores.scripts import BLOCKS, ENTRIES, FIELDS, LAST_ENTRY, MEMBERS
from router.types import BlockHash, Generation, Tier

SCAN_BLOCKS = 2048
"""Blocks per SSCAN: about half a millisecond on each side."""

GENERATION_TTL_S = 3600.0
"""A generation without heartbeats for this time is ignored. Much longer than clock differences."""

GENERATIONS = Bound("generations", 2048, 256)
"""`max_bytes` is the size of one member."""
ROW = Bound("holder row", 4096, len(ROW_FIELDS))
ENTRY = Bound("log entry", 40 * 1024, 64)
"""Publishers write 4,096 blocks at once, which are 32 KiB. `max_items` are the entries of one read, which takes no more
once it has `BATCH_BYTES`: decoding them takes a few milliseconds."""
BATCH_BYTES = 256 * 1024

_Raw = TypeVar("_Raw")
T = TypeVar("T")


class IndexReader:
    """Reads one namespace. Methods raise `redis.RedisError`."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self.nodes = connection.nodes
        self._connection = connection
        self._redis = connection.client
        self._keys = keys
        self._skipped = LoggedOnce()

    async def generations(self, known: Collection[Generation] = ()) -> list[Generation]:
        """Those with a recent heartbeat: first of `known`, which no number of others displaces, then the latest."""
        oldest, members = time.time() - GENERATION_TTL_S, [encode_generation(each) for each in known]
        scores = await self._redis.zmscore(self._keys.scopes, members) if members else ()
        alive = [each for each, score in zip(known, scores, strict=True) if score is not None and score >= oldest]
        newest = await self._members(self._keys.scopes, oldest, GENERATIONS)
        found = [each for member in newest if (each := self._decoded(decode_generation, member))]
        return list(dict.fromkeys([*alive, *found]))

    async def _members(self, key: str, lowest: float | str, bound: Bound) -> list[bytes]:
        """Members of a sorted set, the highest scores first."""
        found, omitted = await self._connection.read(MEMBERS, key, lowest, bound.max_items, bound.max_bytes)
        if omitted:
            self._skipped.warn(TOO_LARGE, what=bound.what, where=key)
        return cast(list[bytes], found)

    async def rows(self, generation: Generation) -> dict[HolderId, HolderRow]:
        scope = scope_of(generation)
        members = await self._members(self._keys.holders(scope), "-inf", HOLDERS)
        ids = [holder.decode(errors="replace") for holder in members]
        found = {holder: await self.row(generation, holder) for holder in ids}
        return {holder: row for holder, row in found.items() if row is not None}

    async def row(self, generation: Generation, holder: HolderId) -> HolderRow | None:
        """One holder; None if it has expired."""
        key = self._keys.holder(scope_of(generation), holder)
        found = await self._connection.read(FIELDS, key, ROW.max_bytes, *ROW_FIELDS)
        if isinstance(found, int):
            self._skipped.warn(TOO_LARGE, what=ROW.what, where=key)
            return None
        fields = {name: value for name, value in zip(ROW_FIELDS, found, strict=True) if value is not None}
        return self._decoded(decode_row, fields, holder=holder) if fields else None

    async def blocks(
        self, generation: Generation, holder: HolderId, row: HolderRow
    ) -> AsyncIterator[tuple[Tier, int, Sequence[BlockHash]]]:
        """Yield the holder's blocks in pieces, each with its tier and type of layers. They include all changes up to
        `row.seq` and perhaps later ones, which can be applied again. A block may occur in several pieces."""
        scope, types = scope_of(generation), len(row.facts.rule.types) if row.facts.rule else 1
        for tier, layer in product(Tier, range(min(types, 1 + MAX_TYPES))):
            key, cursor = self._keys.blocks(scope, holder, row.epoch, tier, layer), b""
            while cursor != b"0":
                cursor, packed = await self._connection.read(BLOCKS, key, cursor or b"0", SCAN_BLOCKS)
                if packed:
                    yield tier, layer, unpack_blocks(packed)

    # --- the log ---

    async def last_entry(self, generation: Generation) -> bytes:
        return bytes(await self._connection.read(LAST_ENTRY, self._keys.log(scope_of(generation))))

    async def entries(self, generation: Generation, after: bytes) -> list[tuple[bytes, LogEntry | None]]:
        """The next log entries. None for an unreadable entry."""
        key = self._keys.log(scope_of(generation))
        found = await self._connection.read(ENTRIES, key, after, ENTRY.max_items, ENTRY.max_bytes, BATCH_BYTES)
        return [(entry_id, self._entry(key, content)) for entry_id, content in found]

    def _entry(self, key: str, content: Sequence[bytes] | int) -> LogEntry | None:
        if isinstance(content, int):
            self._skipped.warn(TOO_LARGE, what=ENTRY.what, where=key)
            return None
        return self._decoded(decode_entry, dict(zip(content[::2], content[1::2], strict=True)))

    def _decoded(self, decode: Callable[[_Raw], T], raw: _Raw, **context: str) -> T | None:
        """None if it is unreadable."""
        try:
            return decode(raw)
        except Unreadable as error:
            self._skipped.warn("skipping unreadable index entry", error=str(error), **context)
            return None
