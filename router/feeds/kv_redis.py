"""What does the cluster publish of its caches?

Follows the log of every generation of the models served here into a `ReplicaStore`: reads what is there, then every
change in order; a holder whose entries do not follow on each other is read anew, and no other. Redis may go away and
come back; the copy stays, and says how old it is. This file never decides what a match is worth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from router.feeds.backoff import Backoff
from router.feeds.supervise import supervise
from router.index.holders import HolderId, KnownHolder
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import ReplicaStore
from router.types import Generation

WAIT_MS = 1000
"""How long one question for news may wait; the copy is up to date after each."""
BATCH_ENTRIES = 64
"""Read at once: tens of thousands of blocks at the most."""
COPIED_BLOCKS = 512
"""Of what is read of a holder, taken in at once: the table may grow meanwhile, the more the more blocks come."""

log = structlog.get_logger()


class IndexFeed:
    """`wanted`: are blocks of this generation of any use here? New generations are looked for every `look_s`."""

    def __init__(
        self, registry: IndexReader, store: ReplicaStore, wanted: Callable[[Generation], bool], *, look_s: float = 1.0
    ) -> None:
        self._registry = registry
        self._store = store
        self._wanted = wanted
        self._look_s = look_s
        self._logs: dict[Generation, _Log] = {}
        self._looked_s: float | None = None
        self.loaded = asyncio.Event()
        """Set once everything that was there at the start has been read."""

    @property
    def holders_read(self) -> int:
        """How often a holder's blocks were read anew."""
        return sum(log.holders_read for log in self._logs.values())

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff = Backoff("generations")
        try:
            while True:
                if await backoff.attempt(self._look):
                    await asyncio.sleep(self._look_s)
                else:
                    self._store.lost()
        finally:
            tasks = [log.task for log in self._logs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._logs.clear()

    async def _look(self) -> None:
        """Begin to follow generations that are new; leave those that nobody publishes under any longer."""
        generations = {each for each in await self._registry.generations() if self._wanted(each)}
        for generation in generations - self._logs.keys():
            self._logs[generation] = _Log(generation, self._registry, self._store, self._heard)
        for generation in self._logs.keys() - generations:
            self._logs.pop(generation).task.cancel()
        self._looked_s = time.monotonic()
        self._heard()

    def _heard(self) -> None:
        """News from somewhere: the copy is as new as the oldest of them."""
        if self._looked_s is None:
            return
        last_seen_s = [log.last_seen_s for log in self._logs.values()]
        oldest_s = min((heard for heard in last_seen_s if heard is not None), default=self._looked_s)
        if None not in last_seen_s and not any(log.failing for log in self._logs.values()):
            self._store.contact(oldest_s)
            self.loaded.set()


class _Log:
    """One generation's log, followed from birth to cancellation of `task`."""

    def __init__(
        self, generation: Generation, registry: IndexReader, store: ReplicaStore, heard: Callable[[], None]
    ) -> None:
        self._generation = generation
        self._registry = registry
        self._store = store
        self._index = store.index
        self._tell = heard
        self._position: bytes | None = None
        self._backoff = Backoff(f"blocks of {generation.model}")
        self.last_seen_s: float | None = None
        self.holders_read = 0
        self.task = asyncio.create_task(supervise(f"index of {generation.model}", self._run))

    @property
    def failing(self) -> bool:
        """Was there no answer when it was last asked?"""
        return self._backoff.failures > 0

    async def _run(self) -> None:
        while True:
            if self._backoff.failures:
                await self._backoff.attempt(self._resume)
            elif await self._backoff.attempt(self._read_all if self._position is None else self._read_on):
                self.last_seen_s = time.monotonic()
                self._tell()
            else:
                self._store.lost()

    async def _resume(self) -> None:
        """Redis is back: nobody could be heard meanwhile, and what had been written last may be lost."""
        self._index.reset_expiry(time.monotonic())
        if self._position is not None and _order(await self._registry.last_entry(self._generation)) < _order(
            self._position
        ):
            self._position = None

    async def _read_all(self) -> None:
        """What is there: first where the log ends, then the holders, so that nothing falls between."""
        position = await self._registry.last_entry(self._generation)
        for holder in await self._registry.rows(self._generation):
            await self._read(holder)
        self._position = position

    async def _read(self, holder: HolderId) -> None:
        row = await self._registry.row(self._generation, holder)
        if row is None:
            return
        self.holders_read += 1
        self._index.begin_copy(self._generation, holder)
        async for tier, blocks in self._registry.blocks(self._generation, holder, row):
            for first in range(0, len(blocks), COPIED_BLOCKS):
                self._index.copy(self._generation, holder, tier, blocks[first : first + COPIED_BLOCKS])
                await asyncio.sleep(0)
        known = KnownHolder(
            id=holder,
            generation=self._generation,
            facts=row.facts,
            epoch=row.epoch,
            seq=row.seq,
            last_seen_s=time.monotonic(),
            complete=row.complete,
        )
        self._index.restore(known)

    async def _read_on(self) -> None:
        """The next changes, and who has not been heard of for too long."""
        assert self._position is not None
        entries = await self._registry.entries(self._generation, self._position, wait_ms=WAIT_MS, count=BATCH_ENTRIES)
        for entry_id, entry in entries:
            if entry is not None and not self._index.apply(self._generation, entry, time.monotonic()):
                await self._read(entry.holder)
            self._position = entry_id
            await asyncio.sleep(0)  # an entry may hold thousands of blocks, and requests are waiting
        for holder in self._index.expire(time.monotonic()):
            log.warning("holder expired: its publisher is silent", holder=holder.id, model=holder.generation.model)


def _order(entry_id: bytes) -> tuple[int, int]:
    """Ids of log entries in the order in which they were written."""
    time_ms, _, number = entry_id.partition(b"-")
    return int(time_ms), int(number)
