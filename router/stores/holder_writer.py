"""How does one publisher write one holder?

Each call is one script and one round trip; what comes back says whether we still are the one who writes. Keeps the
epoch, the number of the next change and how many blocks there must be after it, so that Redis can tell when they are
not. This file never decides what to do about an answer: `router/publisher` does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import StrEnum

from router.index.cluster import EntryKind
from router.index.holders import HolderFacts, HolderId
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys, encode_facts, encode_generation, pack_blocks, scope_of
from router.stores.scripts import APPLY, BEAT, BEGIN, RETIRE
from router.types import BlockChange, Generation, Tier


class WriteResult(StrEnum):
    """What Redis says to a publisher."""

    OK = "ok"
    HELD = "held"
    """Somebody else publishes this holder, and is alive."""
    FENCED = "fenced"
    """Somebody else has begun a newer epoch."""
    LOST = "lost"
    """Redis does not know the holder: it lost it, or forgot it because nothing was heard."""
    GAP = "gap"
    """Redis lacks changes that were acknowledged: a failover."""
    DIVERGED = "diverged"
    """The number of blocks is not what it should be."""


class HolderWriter:
    """One holder as this process publishes it. Methods raise `redis.RedisError` when there is no answer; the same call
    may then be made again, since what was already done is not done twice."""

    def __init__(
        self, connection: RedisConnection, keys: Keys, generation: Generation, holder: HolderId, lifetime_s: float
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._generation = generation
        self._scope = scope_of(generation)
        self._holder = holder
        self._lifetime_ms = int(lifetime_s * 1000)
        self._owner = secrets.token_hex(8)
        self._epoch = 0
        self._seq = 0
        self._counts = dict.fromkeys(Tier, 0)

    @property
    def epoch(self) -> int:
        """The epoch that was begun last; 0 before the first."""
        return self._epoch

    async def begin(
        self, kind: EntryKind, facts: HolderFacts, *, take_over: bool, complete: bool = True
    ) -> WriteResult:
        """Begin a new epoch, with nothing in it yet. Unless `take_over`, only if nobody else publishes this holder."""
        keys = [*self._row_keys(), *(self._blocks_keys() if self._epoch else ())]
        args = (
            self._holder,
            self._owner,
            int(take_over),
            self._lifetime_ms,
            kind,
            encode_facts(facts),
            int(complete),
        )
        word, epoch = await self._connection.script(BEGIN, keys, args)
        if word == b"ok":
            self._epoch, self._seq = int(epoch), 0
            self._counts = dict.fromkeys(Tier, 0)
            await self._connection.announce(self._keys.scopes, encode_generation(self._generation))
        return WriteResult(word.decode())

    async def apply(
        self, changes: Sequence[BlockChange], *, complete: bool, kind: EntryKind = EntryKind.CHANGE
    ) -> WriteResult:
        """The next changes. No block twice for one tier; blocks that come were not there, blocks that go were."""
        packed: dict[Tier, dict[bool, bytes]] = {}
        counts = dict(self._counts)
        for change in changes:
            packed.setdefault(change.tier, {})[change.held] = pack_blocks(change.blocks)
            counts[change.tier] += len(change.blocks) if change.held else -len(change.blocks)
        row, _, log = self._row_keys()
        keys = [row, log, *(self._keys.blocks(self._scope, self._holder, self._epoch, tier) for tier in packed)]
        args: list[object] = [self._holder, self._epoch, self._seq + 1, kind, int(complete), self._lifetime_ms]
        for tier, by_held in packed.items():
            args += [int(tier), by_held.get(True, b""), by_held.get(False, b""), counts[tier]]
        answer = WriteResult((await self._connection.script(APPLY, keys, args)).decode())
        if answer is WriteResult.OK:
            self._seq += 1
            self._counts = counts
        return answer

    async def beat(self, *, complete: bool) -> WriteResult:
        """Say that the holder is still there."""
        keys = [*self._row_keys(), *self._blocks_keys()]
        args = [self._holder, self._epoch, int(complete), self._lifetime_ms, *self._counts.values()]
        answer = WriteResult((await self._connection.script(BEAT, keys, args)).decode())
        await self._connection.announce(self._keys.scopes, encode_generation(self._generation))
        return answer

    async def retire(self) -> WriteResult:
        """Take the holder out of the index."""
        keys = [*self._row_keys(), *self._blocks_keys()]
        return WriteResult((await self._connection.script(RETIRE, keys, (self._holder, self._epoch))).decode())

    def _row_keys(self) -> tuple[str, str, str]:
        keys, scope = self._keys, self._scope
        return keys.holder(scope, self._holder), keys.holders(scope), keys.log(scope)

    def _blocks_keys(self) -> list[str]:
        return [self._keys.blocks(self._scope, self._holder, self._epoch, tier) for tier in Tier]
