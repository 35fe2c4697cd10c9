"""Writes one holder to Redis.

Each call is one script and one round trip; the result says whether this process may still write. Keeps the epoch, the
sequence number and the expected number of blocks, so that the scripts can detect differences. `router/publisher`
decides how to react to a result.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from router.index.cluster import EntryKind
from router.index.holders import HolderFacts, HolderId
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import BlockPlace, Keys, encode_generation, pack_blocks, place_name, scope_of
from router.stores.scripts import APPLY, BEAT, BEGIN, RETIRE
from router.types import BlockChange, Generation, Tier

_NO_BLOCKS: Final[Mapping[BlockPlace, int]] = dict.fromkeys(((tier, 0) for tier in Tier), 0)


class WriteResult(StrEnum):
    OK = "ok"
    HELD = "held"
    """Another process publishes this holder."""
    FENCED = "fenced"
    """Another process has started a newer epoch."""
    LOST = "lost"
    """Redis has no row of the holder: it was lost or has expired."""
    GAP = "gap"
    """Redis lacks acknowledged changes, after a failover."""
    DIVERGED = "diverged"
    """The number of blocks in Redis differs from the expected one."""


class HolderWriter:
    """Writes one holder. Methods raise `redis.RedisError`; they are idempotent and can be repeated."""

    def __init__(
        self, connection: RedisConnection, keys: Keys, generation: Generation, holder: HolderId, holder_ttl_s: float
    ) -> None:
        self.nodes = connection.nodes
        self._connection = connection
        self._keys = keys
        self.generation = generation
        self._scope = scope_of(generation)
        self.holder = holder
        self.holder_ttl_s = holder_ttl_s
        self._ttl_ms = int(holder_ttl_s * 1000)
        self._owner = secrets.token_hex(8)
        self.epoch = 0
        """The current epoch; 0 before the first."""
        self._seq = 0
        self._counts = _NO_BLOCKS

    async def begin(
        self, kind: EntryKind, facts: HolderFacts, *, take_over: bool, complete: bool = True
    ) -> WriteResult:
        """Start a new, empty epoch. Without `take_over`, only if no other process publishes this holder."""
        keys = [*self._row_keys(), *(self._blocks_keys(self._counts) if self.epoch else ())]
        encoded_facts = msgspec.json.encode(facts)
        args = (self.holder, self._owner, int(take_over), self._ttl_ms, kind, encoded_facts, int(complete))
        name, epoch = await self._connection.script(BEGIN, keys, args)
        result = WriteResult(name.decode())
        if result is WriteResult.OK:
            self.epoch, self._seq = int(epoch), 0
            self._counts = _NO_BLOCKS
            await self._connection.touch(self._keys.scopes, encode_generation(self.generation))
        return result

    async def apply(
        self, changes: Sequence[BlockChange], *, complete: bool, kind: EntryKind = EntryKind.CHANGE
    ) -> WriteResult:
        """Write the next changes. Each must be an actual change, and a block may occur once per tier."""
        packed: dict[BlockPlace, dict[bool, bytes]] = {}
        counts = dict(self._counts)
        for change in changes:
            at = change.tier, change.layer
            packed.setdefault(at, {})[change.held] = pack_blocks(change.blocks)
            counts[at] = counts.get(at, 0) + (len(change.blocks) if change.held else -len(change.blocks))
        row, _, log = self._row_keys()
        keys = [row, log, *self._blocks_keys(packed)]
        args: list[object] = [self.holder, self.epoch, self._seq + 1, kind, int(complete), self._ttl_ms]
        for at, by_held in packed.items():
            args += [place_name(*at), by_held.get(True, b""), by_held.get(False, b""), counts[at]]
        result = WriteResult((await self._connection.script(APPLY, keys, args)).decode())
        if result is WriteResult.OK:
            self._seq += 1
            self._counts = counts
        return result

    async def beat(self, *, complete: bool) -> WriteResult:
        keys = [*self._row_keys(), *self._blocks_keys(self._counts)]
        args = [self.holder, self.epoch, int(complete), self._ttl_ms, *self._counts.values()]
        result = WriteResult((await self._connection.script(BEAT, keys, args)).decode())
        await self._connection.touch(self._keys.scopes, encode_generation(self.generation))
        return result

    async def retire(self) -> WriteResult:
        keys = [*self._row_keys(), *self._blocks_keys(self._counts)]
        return WriteResult((await self._connection.script(RETIRE, keys, (self.holder, self.epoch))).decode())

    def _row_keys(self) -> tuple[str, str, str]:
        keys, scope = self._keys, self._scope
        return keys.holder(scope, self.holder), keys.holders(scope), keys.log(scope)

    def _blocks_keys(self, places: Iterable[BlockPlace]) -> list[str]:
        return [self._keys.blocks(self._scope, self.holder, self.epoch, *at) for at in places]
