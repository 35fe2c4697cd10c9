"""Reads the cluster index from Redis: generations, holders, blocks and the log.

Entries that this version cannot decode are skipped with a warning.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import structlog

from router.errors import shortened
from router.index.cluster import LogEntry
from router.index.holders import HolderId
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import (
    HolderRow,
    Keys,
    Unreadable,
    decode_entry,
    decode_generation,
    decode_row,
    pack_blocks,
    scope_of,
    unpack_blocks,
)
from router.types import BlockHash, BlocksByTier, Generation, Tier

SCAN_BLOCKS = 2048
"""Blocks per SSCAN: about half a millisecond on each side."""

GENERATION_TTL_S = 3600.0
"""A generation without heartbeats for this time is ignored. Much longer than clock differences."""

MAX_LOGGED, MAX_LOGGED_CHARACTERS = 100, 500
"""Different errors that are logged."""

_Raw = TypeVar("_Raw")
T = TypeVar("T")

log = structlog.get_logger()


class IndexReader:
    """Reads one namespace. Methods raise `redis.RedisError`."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self.nodes = connection.nodes
        self._redis = connection.client
        self._max_wait_ms = int(connection.timeout_s * 500)
        self._keys = keys
        self._skipped: set[str] = set()

    async def generations(self) -> list[Generation]:
        """All generations with a recent heartbeat."""
        oldest = time.time() - GENERATION_TTL_S
        members = await self._redis.zrangebyscore(self._keys.scopes, oldest, "+inf")
        return [found for member in members if (found := self._decoded(decode_generation, member))]

    async def rows(self, generation: Generation) -> dict[HolderId, HolderRow]:
        """All holders of a generation that have not expired."""
        scope = scope_of(generation)
        ids = [holder.decode(errors="replace") for holder in await self._redis.zrange(self._keys.holders(scope), 0, -1)]
        found = {holder: await self.row(generation, holder) for holder in ids}
        return {holder: row for holder, row in found.items() if row is not None}

    async def row(self, generation: Generation, holder: HolderId) -> HolderRow | None:
        """One holder; None if it has expired."""
        fields = await self._redis.hgetall(self._keys.holder(scope_of(generation), holder))
        return self._decoded(decode_row, fields, holder=holder) if fields else None

    async def blocks(
        self, generation: Generation, holder: HolderId, row: HolderRow
    ) -> AsyncIterator[tuple[Tier, Sequence[BlockHash]]]:
        """Yield the holder's blocks in pieces. They include all changes up to `row.seq` and perhaps later ones, which
        can be applied again. A block may occur in several pieces."""
        scope = scope_of(generation)
        for tier in Tier:
            key, cursor = self._keys.blocks(scope, holder, row.epoch, tier), -1
            while cursor:
                cursor, members = await self._redis.sscan(key, max(cursor, 0), count=SCAN_BLOCKS)
                if members:
                    yield tier, unpack_blocks(b"".join(set(members)))

    async def leading_run(
        self, generation: Generation, holder: HolderId, row: HolderRow, hashes: Sequence[BlockHash]
    ) -> BlocksByTier:
        """Number of leading blocks of a prompt that the holder has, each counted in its nearest tier."""
        if not hashes:
            return 0, 0, 0, 0
        scope, members = scope_of(generation), [pack_blocks([block]) for block in hashes]
        held = [
            await self._redis.smismember(self._keys.blocks(scope, holder, row.epoch, tier), members) for tier in Tier
        ]
        counts = [0] * len(Tier)
        for in_tiers in zip(*held, strict=True):
            if 1 not in in_tiers:
                break
            counts[in_tiers.index(1)] += 1
        gpu, cpu, disk, remote = counts
        return gpu, cpu, disk, remote

    # --- the log ---

    async def last_entry(self, generation: Generation) -> bytes:
        last = await self._redis.xrevrange(self._keys.log(scope_of(generation)), count=1)
        return bytes(last[0][0]) if last else b"0-0"

    async def entries(
        self, generation: Generation, after: bytes, *, wait_ms: int, count: int
    ) -> list[tuple[bytes, LogEntry | None]]:
        """The next log entries; waits up to `wait_ms` for the first one. None for an unreadable entry."""
        wait_ms = min(wait_ms, self._max_wait_ms)
        response = await self._redis.xread({self._keys.log(scope_of(generation)): after}, count=count, block=wait_ms)
        entries = response[0][1] if response else []
        return [(entry_id, self._decoded(decode_entry, fields)) for entry_id, fields in entries]

    def _decoded(self, decode: Callable[[_Raw], T], raw: _Raw, **context: str) -> T | None:
        """None if it is unreadable. Each error is logged once: generations are read again and again."""
        try:
            return decode(raw)
        except Unreadable as error:
            line = shortened(f"{error} {context}", MAX_LOGGED_CHARACTERS)
            if line not in self._skipped and len(self._skipped) < MAX_LOGGED:
                self._skipped.add(line)
                log.warning("skipping unreadable index entry", error=str(error), **context)
            return None
