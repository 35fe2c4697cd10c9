"""Keeps a `ReplicaStore` up to date with the cluster index in Redis.

For each generation of the served models, reads all holders once, then follows the log. A holder with a gap in its
entries is read again. While Redis does not answer, the replica stays and ages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from router.feeds.backoff import Backoff
from router.feeds.supervise import cancel_all, supervise
from router.index.holders import HolderId, KnownHolder, holder_name
from router.stores.index_reader import IndexReader
from router.stores.logged_once import TOO_LARGE, LoggedOnce
from router.stores.prefix_store import ReplicaStore
from router.types import Generation

WAIT_S, MAX_WAIT_S = 0.02, 0.1
"""Time between two reads of a log, which grows while it has no entries. A read that waits in Redis for the next entry
would be sent all of it, however large. Publishers collect changes for 20 ms."""
MAX_GENERATIONS = 8
"""Generations of one model that are followed. During an update there are two, by data type of the KV."""
MAX_HOLDERS = 2048
"""Holders that are known at once: each costs work at every change of one."""
COPY_BLOCKS = 512
"""Blocks to apply before yielding to requests while a holder is read."""

log = structlog.get_logger()


class ReadableGenerations:
    """Whether blocks of a publisher's generation can match prompts of this router. `ours`: its generations by model.
    One that differs is logged once."""

    def __init__(self, ours: Mapping[str, Generation]) -> None:
        self._ours = ours
        self.differing: dict[str, str] = {}
        """By model, how its publisher differs."""
        self._logged = LoggedOnce()

    def __call__(self, generation: Generation) -> bool:
        ours = self._ours.get(generation.model)
        if ours is None:
            return False
        expected, found = (f"{one.tokenizer}, blocks of {one.block_size_tokens}" for one in (ours, generation))
        if expected != found:
            self.differing[generation.model] = f"its publisher has {found}, and this router {expected}"
            event = "ignoring publisher: tokenizer or block size differs"
            self._logged.warn(event, model=generation.model, router=expected, publisher=found)
        return expected == found


class IndexFeed:
    """Follows the logs of all wanted generations. `wanted`: whether to read a generation; checked every `refresh_s`."""

    def __init__(
        self, reader: IndexReader, store: ReplicaStore, wanted: Callable[[Generation], bool], *, refresh_s: float = 1.0
    ) -> None:
        self._reader = reader
        self._store = store
        self._wanted = wanted
        self._refresh_s = refresh_s
        self._logs: dict[Generation, _Log] = {}
        self._refreshed_s: float | None = None
        self._skipped = LoggedOnce()
        self.loaded = asyncio.Event()
        """Set once all holders present at the start have been read."""
        self._backoff = Backoff("generations", reader.nodes)

    @property
    def error(self) -> str:
        """That of the last reads; empty if they succeeded."""
        errors = (each.error for each in (self._backoff, *(log.backoff for log in self._logs.values())))
        return next(filter(None, errors), "")

    @property
    def holders_read(self) -> int:
        return sum(log.holders_read for log in self._logs.values())

    async def run(self) -> None:
        try:
            while True:
                if await self._backoff.attempt(self._refresh):
                    await asyncio.sleep(self._refresh_s)
                else:
                    self._store.mark_stale()
        finally:
            await cancel_all(log.task for log in self._logs.values())
            self._logs.clear()

    async def _refresh(self) -> None:
        generations = self._followed(filter(self._wanted, await self._reader.generations(tuple(self._logs))))
        for generation in generations - self._logs.keys():
            self._logs[generation] = _Log(generation, self._reader, self._store, self._update_age)
        for generation in self._logs.keys() - generations:
            self._logs.pop(generation).task.cancel()
        self._refreshed_s = time.monotonic()
        self._update_age()

    def _followed(self, found: Iterable[Generation]) -> set[Generation]:
        """The first of each model."""
        of_model: dict[str, list[Generation]] = {}
        for generation in found:
            of_model.setdefault(generation.model, []).append(generation)
        for model, generations in of_model.items():
            if len(generations) > MAX_GENERATIONS:
                self._skipped.warn(TOO_LARGE, what="number of generations", where=model)
        return {each for generations in of_model.values() for each in generations[:MAX_GENERATIONS]}

    def _update_age(self) -> None:
        """The replica is as old as the log that was read least recently."""
        if self._refreshed_s is None:
            return
        read_s = [log.read_s for log in self._logs.values()]
        oldest_s = min((at_s for at_s in read_s if at_s is not None), default=self._refreshed_s)
        if None not in read_s and not any(log.backoff.failures for log in self._logs.values()):
            self._store.mark_current(oldest_s)
            self.loaded.set()


class _Log:
    """Follows one generation's log until `task` is cancelled."""

    def __init__(
        self, generation: Generation, reader: IndexReader, store: ReplicaStore, on_read: Callable[[], None]
    ) -> None:
        self._generation = generation
        self._reader = reader
        self._store = store
        self._index = store.index
        self._on_read = on_read
        self._position: bytes | None = None
        self._wait_s = WAIT_S
        self._skipped = LoggedOnce()
        self.backoff = Backoff(f"blocks of {generation.model}", reader.nodes)
        self.read_s: float | None = None
        self.holders_read = 0
        self.task = asyncio.create_task(supervise(f"index of {generation.model}", self._run))

    async def _run(self) -> None:
        while True:
            if self.backoff.failures:
                await self.backoff.attempt(self._resume)
            elif await self.backoff.attempt(self._read_all if self._position is None else self._read_on):
                self.read_s = time.monotonic()
                self._on_read()
            else:
                self._store.mark_stale()

    async def _resume(self) -> None:
        """Restart the holders' TTLs after an outage; read everything again if the log has lost entries."""
        self._index.reset_expiry(time.monotonic())
        if self._position is not None and _order(await self._reader.last_entry(self._generation)) < _order(
            self._position
        ):
            self._position = None

    async def _read_all(self) -> None:
        """Read all holders. The end of the log is read first, so that no change is missed."""
        position = await self._reader.last_entry(self._generation)
        for holder in await self._reader.rows(self._generation):
            await self._read(holder)
        self._position = position

    async def _read(self, holder: HolderId) -> None:
        row = await self._reader.row(self._generation, holder)
        if row is None or not self._has_room(holder):
            return
        self.holders_read += 1
        self._index.begin_copy(self._generation, holder)
        async for tier, layer, blocks in self._reader.blocks(self._generation, holder, row):
            for first in range(0, len(blocks), COPY_BLOCKS):
                self._index.copy(self._generation, holder, tier, blocks[first : first + COPY_BLOCKS], layer)
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
        assert self._position is not None
        entries = await self._reader.entries(self._generation, self._position)
        for entry_id, entry in entries:
            now_s = time.monotonic()
            if entry and self._has_room(entry.holder) and not self._store.apply_entry(self._generation, entry, now_s):
                await self._read(entry.holder)
            self._position = entry_id
            await asyncio.sleep(0)  # yield to requests: an entry may contain thousands of blocks
        for holder in self._index.expire(time.monotonic()):
            log.warning("holder expired without heartbeat", holder=holder.id, model=holder.generation.model)
        self._wait_s = WAIT_S if entries else min(2 * self._wait_s, MAX_WAIT_S)
        is_behind = len(entries) > 1 or any(entry is None for _, entry in entries)
        await asyncio.sleep(0 if is_behind else self._wait_s)

    def _has_room(self, holder: HolderId) -> bool:
        """Whether the holder is known or may become so."""
        holders = self._index.holders
        if len(holders) < MAX_HOLDERS or holders.get(holder_name(self._generation, holder)) is not None:
            return True
        self._skipped.warn(TOO_LARGE, what="number of holders", where=self._generation.model)
        return False


def _order(entry_id: bytes) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition(b"-")
    return int(time_ms), int(number)
