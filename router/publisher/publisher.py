"""The holders that this process publishes: one `PublishedHolder` and one task for each.

Receives the events of pods and of stores. A new revision of a model moves its holders to the new generation at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import structlog

from router.config.index_schema import Publish
from router.feeds.supervise import supervise
from router.index.holder_blocks import Blocks
from router.index.holders import HolderFacts, HolderId
from router.publisher.published_holder import PublishedHolder
from router.stores.holder_writer import HolderWriter
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.types import Generation, KvEvent, Pod, PodId

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Publisher:
    """Published holders by id; an `EventStore` for pods. `generations` by model."""

    connection: RedisConnection
    keys: Keys
    generations: dict[str, Generation]
    facts_of: Callable[[Pod], HolderFacts]
    settings: Publish
    holder_ttl_s: float
    _holders: dict[HolderId, PublishedHolder] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def holders(self) -> tuple[PublishedHolder, ...]:
        return tuple(self._holders.values())

    def publishes(self, holder_id: HolderId) -> bool:
        return holder_id in self._holders

    # --- pods: an EventStore ---

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        current = self.generations.get(generation.model, generation)
        self.begin(pod.id, current, self.facts_of(pod))

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Apply a holder's events in order. Events of unpublished holders are ignored."""
        holder = self._holders.get(pod)
        if holder is not None:
            holder.apply(events)

    def size_blocks(self, pod: PodId) -> int:
        holder = self._holders.get(pod)
        return holder.blocks.size_blocks if holder else 0

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """All past events are delivered; `complete` is False if some are lost for good."""
        holder = self._holders.get(pod)
        if holder is not None:
            holder.caught_up(complete=complete)

    # --- any holder ---

    def begin(self, holder_id: HolderId, generation: Generation, facts: HolderFacts) -> None:
        """Publish a holder, or start a new, empty epoch of a published one."""
        known = self._holders.get(holder_id)
        if known is not None and known.generation == generation:
            known.restarted()
            return
        self.end(holder_id)
        holder = PublishedHolder(
            HolderWriter(self.connection, self.keys, generation, holder_id, holder_ttl_s=self.holder_ttl_s),
            facts,
            self.settings,
            resolve_hash=self._resolve_hash if facts.reach else None,
        )
        self._holders[holder_id] = holder
        task = asyncio.create_task(supervise(f"publishing {holder_id}", holder.run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, holder_id: HolderId) -> None:
        holder = self._holders.pop(holder_id, None)
        if holder is not None:
            holder.stop()

    def replace_revision(self, model: str, revision: str) -> Generation:
        """Drop all published blocks of a model whose weights have changed and continue under the new revision. Raises
        `KeyError` for a model that is not published."""
        generation = replace(self.generations[model], revision=revision)
        self.generations[model] = generation
        for holder in self.holders:
            if holder.generation.model == model and holder.generation != generation:
                self.begin(holder.id, generation, holder.facts)
                self.caught_up(holder.id, complete=True)
        log.info("model revision replaced", model=model, revision=revision)
        return generation

    async def stop(self) -> None:
        for holder_id in list(self._holders):
            self.end(holder_id)
        try:
            async with asyncio.timeout(self.holder_ttl_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        except TimeoutError:
            log.warning("some holders not removed from the index; they will expire")

    def _resolve_hash(self, engine_hash: int) -> Blocks | None:
        """The blocks of a hash without tokens, from any holder that has announced it with tokens."""
        for holder in self._holders.values():
            blocks = holder.blocks.blocks_of(engine_hash)
            if blocks is not None:
                return blocks
        return None


@dataclass(frozen=True, slots=True)
class StoreSink:
    """A `TierSink` that publishes the holders of one source. `facts_of` returns a holder's facts by its name."""

    publisher: Publisher
    model: str
    facts_of: Callable[[str], HolderFacts]

    def restarted(self, holder: str) -> None:
        """Add a holder, or drop the blocks of a known one."""
        self.publisher.begin(holder, self.publisher.generations[self.model], self.facts_of(holder))

    def apply(self, holder: str, events: tuple[KvEvent, ...]) -> None:
        self._add(holder)
        self.publisher.apply(holder, events)

    def stream_state(self, holder: str, *, complete: bool) -> None:
        self._add(holder)
        self.publisher.caught_up(holder, complete=complete)

    def gone(self, holder: str) -> None:
        self.publisher.end(holder)

    def _add(self, holder: str) -> None:
        if not self.publisher.publishes(holder):
            self.restarted(holder)
