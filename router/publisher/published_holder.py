"""Writes one holder's blocks to Redis and keeps both in agreement.

Events are applied in memory at once; a background task collects changes for a short time and writes them in one round
trip. When Redis and this process disagree, all blocks are written again in a new epoch; a cleared cache starts a new
epoch at once. If several processes publish the same holder, the newest one writes and the others stand by.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

import structlog
from redis.exceptions import RedisError

from router.config.index_schema import Publish
from router.feeds.backoff import Backoff
from router.index.cluster import EntryKind
from router.index.holder_blocks import HashResolver, HolderBlocks
from router.index.holders import HolderFacts, HolderId
from router.publisher.changes import HolderPlaces, PendingChanges, TierExpiry, split_held
from router.stores.holder_writer import HolderWriter, WriteResult
from router.types import BlockChange, BlocksCleared, Generation, KvEvent, Tier

START_S = 3.0
"""Maximum wait for the first events."""
MAX_WRITE_BLOCKS = 4096
"""Blocks of one write: about two milliseconds of the server's time."""

log = structlog.get_logger()


class PublishState(StrEnum):
    STARTING = "starting"
    PUBLISHING = "publishing"
    STANDBY = "standby"
    """Another process publishes this holder."""
    UNREACHABLE = "unreachable"
    """Redis does not answer."""


class PublishedHolder:
    """One published holder. Its source calls `apply`, `restarted` and `caught_up`; `run` writes until `stop`."""

    def __init__(
        self,
        writer: HolderWriter,
        facts: HolderFacts,
        settings: Publish,
        resolve_hash: HashResolver | None = None,
        start_s: float = START_S,
    ) -> None:
        self.id: HolderId = writer.holder
        self.generation: Generation = writer.generation
        self.facts = facts
        self.state = PublishState.STARTING
        self.complete = True
        self.written_blocks = 0
        self.reloads = 0
        self.failures = 0
        self._places = HolderPlaces(self.generation, resolve_hash)
        self._announced = facts
        """Those of the epoch."""
        self._writer = writer
        self._settings = settings
        self._start_s = start_s
        self._beat_s = min(settings.heartbeat_s, writer.holder_ttl_s / 3)
        self._resolve_hash = resolve_hash
        self._expiry = TierExpiry({} if facts.reach else {Tier[tier.upper()]: ttl_s for tier, ttl_s in settings.ttl})
        self._pending = PendingChanges()
        self._backlog: list[list[BlockChange]] = []
        """Rest of a reload; the last item is empty and becomes the seal."""
        self._batch: tuple[EntryKind, list[BlockChange]] | None = None
        """The write in progress, or one whose response was lost."""
        self._epoch_due: EntryKind | None = EntryKind.RELOAD
        self._take_over = True
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._stopping = False
        self._next_beat_s = 0.0
        self._published_complete = True

    @property
    def blocks(self) -> HolderBlocks:
        return self._places.blocks

    @property
    def pending_blocks(self) -> int:
        return len(self._pending) + sum(len(change.blocks) for piece in self._backlog for change in piece)

    # --- called by the source ---

    def apply(self, events: Iterable[KvEvent]) -> None:
        events = tuple(events)
        self._expiry.observe(events, time.monotonic())
        self._apply(events)

    def _apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksCleared):
                self.restarted()
                continue
            for change in self._places.apply(event):
                self._pending.add(change)
        self._changed.set()

    def restarted(self) -> None:
        """Drop all blocks: the holder's cache is empty."""
        self._places = HolderPlaces(self.generation, self._resolve_hash)
        self._expiry.observe((BlocksCleared(),), 0.0)
        self._pending.clear()
        self._backlog.clear()
        self._batch = None
        self._epoch_due = EntryKind.EMPTY
        self._ready.set()
        self._changed.set()

    def caught_up(self, *, complete: bool) -> None:
        """The source has delivered all past events; `complete` is False if some are lost for good."""
        self.complete = complete
        self._ready.set()
        self._changed.set()

    # --- writing ---

    async def run(self) -> None:
        """Publish until `stop`, then remove the holder from the index."""
        await self._wait_until_ready()
        backoff = Backoff(f"blocks of {self.id}", self._writer.nodes)
        while not self._stopping:
            if not await backoff.attempt(self._step):
                self.failures += 1
                self.state = PublishState.UNREACHABLE
        await self._retire()

    def stop(self) -> None:
        self._stopping = True
        self._ready.set()
        self._changed.set()

    async def _wait_until_ready(self) -> None:
        """Let a previous publisher's blocks stay readable until this one has blocks to replace them."""
        with suppress(TimeoutError):  # if no events arrive in time, the holder is published as empty
            async with asyncio.timeout(self._start_s):
                await self._ready.wait()

    async def _step(self) -> None:
        if self._epoch_due is not None:
            await self._begin_epoch(self._epoch_due)
        elif self._batch is not None:  # its response was lost; Redis ignores it if it was already applied
            await self._write()
        elif time.monotonic() >= self._next_beat_s or self.complete is not self._published_complete:
            await self._beat()
        elif self._next_batch():
            await self._write()
        else:
            await self._wait_for_change()

    async def _begin_epoch(self, kind: EntryKind) -> None:
        self._epoch_due = None
        self._announced = self._current_facts()
        try:
            result = await self._writer.begin(kind, self._announced, take_over=self._take_over, complete=self.complete)
        except BaseException:
            self._schedule_epoch(kind)
            raise
        self._take_over = False
        if result is WriteResult.HELD:
            self._schedule_epoch(kind)
            await self._stand_by()
            return
        if kind is EntryKind.RELOAD and self._epoch_due is None:
            self._pending.clear()
            self._backlog = [*split_held(self._places.held(), MAX_WRITE_BLOCKS), []]
            self.reloads += 1
        self.state = PublishState.PUBLISHING
        self._next_beat_s = time.monotonic() + self._beat_s
        log.info("epoch started", holder=self.id, epoch=self._writer.epoch, kind=kind.value)

    def _current_facts(self) -> HolderFacts:
        """With what the events have shown."""
        return replace(self.facts, rule=self.blocks.rule, ahead_tokens=self.blocks.ahead_tokens)

    def _schedule_epoch(self, kind: EntryKind) -> None:
        """Start an epoch in the next step, unless a cleared cache has already scheduled one."""
        self._epoch_due = self._epoch_due or kind

    def _next_batch(self) -> bool:
        """Set `_batch` to the next write. False if there is none."""
        if self._batch is None and self._backlog:
            piece = self._backlog.pop(0)
            self._batch = (EntryKind.CHANGE if self._backlog else EntryKind.SEAL), piece
        elif self._batch is None and self._pending:
            self._batch = EntryKind.CHANGE, self._pending.take(MAX_WRITE_BLOCKS)
        return self._batch is not None

    async def _write(self) -> None:
        batch = self._batch
        assert batch is not None
        kind, changes = batch
        result = await self._writer.apply(changes, complete=self.complete, kind=kind)
        if self._batch is batch:
            self._batch = None
        self.written_blocks += sum(len(change.blocks) for change in changes)
        await self._handle(result)
        if not self._backlog and len(self._pending) < MAX_WRITE_BLOCKS:
            await asyncio.sleep(self._settings.flush_interval_ms / 1000)

    async def _beat(self) -> None:
        self._apply(self._expiry.expired(time.monotonic()))
        for change in self._places.retry():
            self._pending.add(change)
        if self._current_facts() != self._announced:  # readers ignore layers that the epoch's facts do not name
            self._schedule_epoch(EntryKind.RELOAD)
            return
        complete = self.complete
        result = await self._writer.beat(complete=complete)
        self._published_complete = complete
        self._next_beat_s = time.monotonic() + self._beat_s * random.uniform(0.9, 1)
        await self._handle(result)

    async def _handle(self, result: WriteResult) -> None:
        if result is WriteResult.OK:
            self.state = PublishState.PUBLISHING
            return
        log.warning("holder reload scheduled", holder=self.id, reason=result.value)
        self._batch = None
        self._schedule_epoch(EntryKind.RELOAD)
        if result is WriteResult.FENCED:
            await self._stand_by()
        else:
            await asyncio.sleep(random.uniform(0, self._settings.reload_jitter_s))

    async def _stand_by(self) -> None:
        """Wait one heartbeat interval, then check whether the other publisher is still active."""
        if self.state is not PublishState.STANDBY:
            log.info("standby: another process publishes this holder", holder=self.id)
        self.state = PublishState.STANDBY
        with suppress(TimeoutError):
            async with asyncio.timeout(self._beat_s):
                while not self._stopping:
                    self._changed.clear()
                    await self._changed.wait()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self._next_beat_s - time.monotonic(), 0.0)):
                await self._changed.wait()

    async def _retire(self) -> None:
        if self.state is not PublishState.PUBLISHING:
            return
        try:
            await self._writer.retire()
            log.info("holder removed from the index", holder=self.id)
        except (RedisError, OSError) as error:
            log.warning("holder not removed from the index; it will expire", holder=self.id, error=repr(error))
