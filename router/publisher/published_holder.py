"""How does one holder's cache get into Redis, and stay right there?

Takes what a source tells of the holder, at once and without waiting, and writes it in its own time: changes are
gathered for a moment and sent in one round trip. What Redis and we know of the holder is the same, or the whole is
written again in a new epoch; a cache that was emptied begins a new epoch at once. If somebody else publishes the same
holder, the newest publisher wins and the others stand by until it is silent. This file reads no event format.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import structlog
from redis.exceptions import RedisError

from router.feeds.backoff import Backoff
from router.index.cluster import EntryKind
from router.index.holder_blocks import HashResolver, HolderBlocks
from router.index.holders import HolderFacts, HolderId
from router.publisher.expiry import TierExpiry
from router.publisher.pending import PendingChanges, in_pieces
from router.stores.holder_writer import HolderWriter, WriteResult
from router.types import BlockChange, BlocksCleared, Generation, KvEvent, Tier

MOST_BLOCKS = 4096
"""Blocks of one write: about two milliseconds of the server's time."""

log = structlog.get_logger()


class PublishState(StrEnum):
    """How it stands between this publisher and Redis."""

    STARTING = "starting"
    PUBLISHING = "publishing"
    STANDBY = "standby"
    """Somebody else publishes this holder."""
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTiming:
    """How eagerly to write. `reload_jitter_s`: publishers that all lost the same Redis come back within this time."""

    lifetime_s: float = 15.0
    beat_s: float = 5.0
    flush_interval_s: float = 0.02
    start_s: float = 3.0
    reload_jitter_s: float = 1.0


@dataclass(slots=True)
class Counts:
    """What this holder's publisher has done."""

    blocks: int = 0
    writes: int = 0
    reloads: int = 0
    failures: int = 0


class PublishedHolder:
    """One holder. `apply`, `restarted` and `caught_up` are the source's; `run` writes until `stop`."""

    def __init__(
        self,
        holder: HolderId,
        publication: HolderWriter,
        generation: Generation,
        facts: HolderFacts,
        timing: PublishTiming,
        resolve_hash: HashResolver | None = None,
        ttl_s: Mapping[Tier, float] | None = None,
    ) -> None:
        self.id = holder
        self.generation = generation
        self.standing = PublishState.STARTING
        self.complete = True
        self.counts = Counts()
        self._publication = publication
        self.facts = facts
        self._timing = timing
        self._resolve_hash = resolve_hash
        self.blocks = HolderBlocks(generation, resolve_hash)
        self._expiry = TierExpiry(ttl_s or {})
        self._pending = PendingChanges()
        self._backlog: list[list[BlockChange]] = []
        self._batch: tuple[EntryKind, list[BlockChange]] | None = None
        self._due: EntryKind | None = EntryKind.RELOAD
        self._take_over = True
        self._news = asyncio.Event()
        self._ready = asyncio.Event()
        self._leaving = False
        self._beat_at_s = 0.0
        self._complete_told = True

    @property
    def pending_blocks(self) -> int:
        """Blocks whose change Redis has not been told."""
        return len(self._pending) + sum(len(change.blocks) for piece in self._backlog for change in piece)

    # --- what the source tells ---

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Events of the holder, in order."""
        events = tuple(events)
        self._expiry.note(events, time.monotonic())
        self._take(events)

    def _take(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksCleared):
                self.restarted()
                continue
            for change in self.blocks.apply(event):
                self._pending.note(change)
        self._news.set()

    def restarted(self) -> None:
        """The holder's cache is empty: nothing of what was published counts any longer."""
        self.blocks = HolderBlocks(self.generation, self._resolve_hash)
        self._expiry.note((BlocksCleared(),), 0.0)
        self._pending.clear()
        self._backlog.clear()
        self._batch = None
        self._due = EntryKind.EMPTY
        self._ready.set()
        self._news.set()

    def caught_up(self, *, complete: bool) -> None:
        """The source has told all that there was; `complete` False if some of it is lost for good."""
        self.complete = complete
        self._ready.set()
        self._news.set()

    # --- writing ---

    async def run(self) -> None:
        """Publish until `stop`, then take the holder out of the index."""
        await self._first_news()
        backoff = Backoff(f"blocks of {self.id}")
        while not self._leaving:
            if not await backoff.attempt(self._step):
                self.counts.failures += 1
                self.standing = PublishState.UNREACHABLE
        await self._retire()

    def stop(self) -> None:
        """Leave as soon as the write that is under way is done."""
        self._leaving = True
        self._ready.set()
        self._news.set()

    async def _first_news(self) -> None:
        """Whoever published before us is still read: take over once there is something to take over with."""
        try:
            async with asyncio.timeout(self._timing.start_s):
                await self._ready.wait()
        except TimeoutError:
            pass  # a source that is silent has nothing, as far as anybody knows

    async def _step(self) -> None:
        if self._due is not None:
            await self._begin(self._due)
        elif self._batch is not None:  # its answer was lost: Redis may count it already
            await self._write()
        elif time.monotonic() >= self._beat_at_s or self.complete is not self._complete_told:
            await self._beat()
        elif self._next_batch():
            await self._write()
        else:
            await self._rest()

    async def _begin(self, kind: EntryKind) -> None:
        self._due = None
        try:
            answer = await self._publication.begin(kind, self.facts, take_over=self._take_over, complete=self.complete)
        except BaseException:
            self._begin_again_with(kind)
            raise
        self._take_over = False
        if answer is WriteResult.HELD:
            self._begin_again_with(kind)
            await self._stand_by()
            return
        if kind is EntryKind.RELOAD and self._due is None:
            self._pending.clear()
            self._backlog = [*in_pieces(self.blocks.held(), MOST_BLOCKS), []]
            self.counts.reloads += 1
        self.standing = PublishState.PUBLISHING
        self._beat_at_s = time.monotonic() + self._timing.beat_s
        log.info("publishing", holder=self.id, epoch=self._publication.epoch, begins=kind.value)

    def _begin_again_with(self, kind: EntryKind) -> None:
        """Unless the cache was emptied meanwhile."""
        self._due = self._due or kind

    def _next_batch(self) -> bool:
        """Is there anything to write?"""
        if self._batch is None and self._backlog:
            piece = self._backlog.pop(0)
            self._batch = (EntryKind.CHANGE if self._backlog else EntryKind.SEAL), piece
        elif self._batch is None and self._pending:
            self._batch = EntryKind.CHANGE, self._pending.take(MOST_BLOCKS)
        return self._batch is not None

    async def _write(self) -> None:
        batch = self._batch
        assert batch is not None
        kind, changes = batch
        answer = await self._publication.apply(changes, complete=self.complete, kind=kind)
        if self._batch is batch:
            self._batch = None
        self.counts.writes += 1
        self.counts.blocks += sum(len(change.blocks) for change in changes)
        await self._mind(answer)
        if not self._backlog and len(self._pending) < MOST_BLOCKS:
            await asyncio.sleep(self._timing.flush_interval_s)

    async def _beat(self) -> None:
        self._take(self._expiry.due(time.monotonic()))
        for change in self.blocks.retry():
            self._pending.note(change)
        complete = self.complete
        answer = await self._publication.beat(complete=complete)
        self._complete_told = complete
        self._beat_at_s = time.monotonic() + self._timing.beat_s * random.uniform(0.9, 1)
        await self._mind(answer)

    async def _mind(self, answer: WriteResult) -> None:
        """Anything but OK means that Redis and we differ, and who is right."""
        if answer is WriteResult.OK:
            self.standing = PublishState.PUBLISHING
            return
        log.warning("publishing anew", holder=self.id, because=answer.value)
        self._batch = None
        self._begin_again_with(EntryKind.RELOAD)
        if answer is WriteResult.FENCED:
            await self._stand_by()
        else:
            await asyncio.sleep(random.uniform(0, self._timing.reload_jitter_s))

    async def _stand_by(self) -> None:
        if self.standing is not PublishState.STANDBY:
            log.info("standing by: somebody else publishes this holder", holder=self.id)
        self.standing = PublishState.STANDBY
        try:
            async with asyncio.timeout(self._timing.beat_s):
                while not self._leaving:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass  # time to see whether it is still there

    async def _rest(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(max(self._beat_at_s - time.monotonic(), 0.0)):
                await self._news.wait()
        except TimeoutError:
            pass  # a heartbeat is due

    async def _retire(self) -> None:
        if self.standing is not PublishState.PUBLISHING:
            return
        try:
            await self._publication.retire()
            log.info("no longer in the index", holder=self.id)
        except (RedisError, OSError) as error:
            log.warning("could not leave the index: it will expire", holder=self.id, why=repr(error))
