"""Which holders does this process publish?

One `PublishedHolder` for each, with its task. Takes what event streams tell of pods, and what sources tell of stores;
a model that is replaced under its name moves its holders to the new generation at once. This file writes nothing
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import structlog

from router.feeds.supervise import supervise
from router.index.holder_blocks import Blocks
from router.index.holders import HolderFacts, HolderId
from router.publisher.published_holder import PublishedHolder, PublishTiming
from router.stores.holder_writer import HolderWriter
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.types import Generation, KvEvent, Pod, PodId, Tier

log = structlog.get_logger()


class Publisher:
    """Holders by id; an `EventStore` for pods. `generations` by model."""

    def __init__(
        self,
        connection: RedisConnection,
        keys: Keys,
        generations: dict[str, Generation],
        facts_of: Callable[[Pod], HolderFacts],
        timing: PublishTiming,
        ttl_s: Mapping[Tier, float] | None = None,
    ) -> None:
        self.generations = generations
        self._connection = connection
        self._keys = keys
        self._facts_of = facts_of
        self._timing = timing
        self._ttl_s = ttl_s or {}
        """Of pods: stores tell what is gone."""
        self._holders: dict[HolderId, PublishedHolder] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def holders(self) -> tuple[PublishedHolder, ...]:
        """All that are published."""
        return tuple(self._holders.values())

    def publishes(self, holder_id: HolderId) -> bool:
        """Is this holder published?"""
        return holder_id in self._holders

    # --- pods: an EventStore ---

    def add_holder(self, pod: Pod, generation: Generation) -> None:
        """Begin a (new) life of the pod's cache, empty."""
        current = self.generations.get(generation.model, generation)
        self.begin(pod.id, current, self._facts_of(pod))

    def apply(self, pod: PodId, events: Iterable[KvEvent]) -> None:
        """Take over what a holder announced, in order. A holder that is not published is ignored."""
        holder = self._holders.get(pod)
        if holder is not None:
            holder.apply(events)

    def caught_up(self, pod: PodId, *, complete: bool) -> None:
        """All was told that there was; `complete` False if some of it is lost for good."""
        holder = self._holders.get(pod)
        if holder is not None:
            holder.caught_up(complete=complete)

    # --- any holder ---

    def begin(self, holder_id: HolderId, generation: Generation, facts: HolderFacts) -> None:
        """Publish a holder, or a new and empty life of one that is published already."""
        known = self._holders.get(holder_id)
        if known is not None and known.generation == generation:
            known.restarted()
            return
        self.end(holder_id)
        publication = HolderWriter(
            self._connection, self._keys, generation, holder_id, lifetime_s=self._timing.lifetime_s
        )
        holder = PublishedHolder(
            holder_id,
            publication,
            generation,
            facts,
            self._timing,
            resolve_hash=self._known_anywhere if facts.reach else None,
            ttl_s=None if facts.reach else self._ttl_s,
        )
        self._holders[holder_id] = holder
        task = asyncio.create_task(supervise(f"publishing {holder_id}", holder.run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, holder_id: HolderId) -> None:
        """Take a holder out of the index."""
        holder = self._holders.pop(holder_id, None)
        if holder is not None:
            holder.stop()

    def replace_revision(self, model: str, revision: str) -> Generation:
        """The weights behind a model's name are others now: what was published of it counts no longer. `KeyError` for
        a model that is not published here."""
        generation = replace(self.generations[model], revision=revision)
        self.generations[model] = generation
        for holder in self.holders:
            if holder.generation.model == model and holder.generation != generation:
                self.begin(holder.id, generation, holder.facts)
                self.caught_up(holder.id, complete=True)
        log.info("another revision", model=model, revision=revision)
        return generation

    async def stop(self) -> None:
        """End all, and leave the index consistent."""
        for holder_id in list(self._holders):
            self.end(holder_id)
        try:
            async with asyncio.timeout(self._timing.lifetime_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        except TimeoutError:
            log.warning("some holders could not be taken out of the index: they will expire")

    def _known_anywhere(self, engine_hash: int) -> Blocks | None:
        """What a block is that a store names by hash alone: some pod has announced it with its tokens."""
        for holder in self._holders.values():
            blocks = holder.blocks.blocks_of(engine_hash)
            if blocks is not None:
                return blocks
        return None
