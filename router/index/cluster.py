"""The router's replica of the cluster index, built from the log that all publishers write.

Log entries are numbered by holder and epoch. An entry that does not follow the previous one is refused, and the holder
must be read again (`begin_copy`, `copy`, `restore`). A newer epoch ends the previous one at once; during a reload the
old blocks stay readable until the reload is sealed. A holder without entries for its TTL expires. This file does no
Redis I/O and reads no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from router.hashing import hashes_ahead
from router.index.evicted import EvictedBlocks
from router.index.hit_probe import CacheHabits
from router.index.holders import (
    HolderFacts,
    HolderId,
    HolderName,
    Holders,
    KnownHolder,
    hashes_by_generation,
    holder_name,
)
from router.index.masks import SCATTER, HolderMasks
from router.types import BlockChange, BlockHash, BlocksByTier, Generation, PodId, PromptPrefix, Tier

MAX_EXPIRED = 8
"""Holders that are dropped at once, each of which takes time in proportion to all others."""


class EntryKind(StrEnum):
    EMPTY = "empty"
    """A new epoch without blocks."""
    RELOAD = "reload"
    """A new epoch in which the publisher writes all blocks of the holder again."""
    CHANGE = "change"
    SEAL = "seal"
    """The last change of a reload."""
    BEAT = "beat"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One log entry. `seq` counts the changes of an epoch from 1; a BEAT repeats the last `seq`."""

    kind: EntryKind
    holder: HolderId
    epoch: int
    seq: int = 0
    complete: bool = True
    facts: HolderFacts | None = None
    """Set in EMPTY and RELOAD."""
    changes: Sequence[BlockChange] = ()


class ClusterIndex:
    """All holders of all generations that this router reads. `max_bytes` limits the block table."""

    def __init__(self, *, holder_ttl_s: float, max_bytes: int | None = None, scatter: int = SCATTER) -> None:
        self._holder_ttl_s = holder_ttl_s
        self.masks = HolderMasks(max_bytes, scatter)
        self.evicted = defaultdict[str, EvictedBlocks](EvictedBlocks)
        """By model."""
        self.holders = Holders()

    def match(self, prefix: PromptPrefix) -> dict[PodId, BlocksByTier]:
        """Leading blocks of `prefix` by pod and tier."""
        tokens = len(prefix.tokens), prefix.block_size_tokens
        return self.holders.by_pod(self.masks.walk(hashes, tokens) for hashes in self._lookups(prefix))

    def _lookups(self, prefix: PromptPrefix) -> Iterator[Sequence[BlockHash]]:
        for _, hashes in hashes_by_generation(prefix, self.holders.generations):
            yield hashes
            for ahead in self.holders.aheads:
                yield hashes_ahead(prefix, hashes, ahead)

    # --- log entries ---

    def apply(
        self,
        generation: Generation,
        entry: LogEntry,
        now_s: float,
        on_change: Callable[[PodId, BlockChange], None] = lambda _pod, _change: None,
    ) -> bool:
        """Apply the next entry of a generation's log. False if the holder must be read again. `on_change` gets a pod
        and what it has announced."""
        known = self.holders.get(holder_name(generation, entry.holder))
        if known is not None and entry.epoch < known.epoch:
            return True  # from a publisher that has been fenced off
        if entry.kind is EntryKind.GONE:
            if known is not None:
                self.drop(known)
            return True
        if entry.kind in (EntryKind.EMPTY, EntryKind.RELOAD):
            return self._begin_epoch(generation, entry, known, now_s)
        if known is None or entry.epoch > known.epoch:
            return False
        return self._continue_epoch(known, entry, now_s, on_change)

    def _begin_epoch(self, generation: Generation, entry: LogEntry, known: KnownHolder | None, now_s: float) -> bool:
        if known is not None and entry.epoch == known.epoch:
            return True
        if entry.facts is None:
            return False
        holder = KnownHolder(
            id=entry.holder,
            generation=generation,
            facts=entry.facts,
            epoch=entry.epoch,
            seq=0,
            last_seen_s=now_s,
            complete=entry.complete,
            reloading=entry.kind is EntryKind.RELOAD,
        )
        self.masks.forget(_collected_name(holder.name))
        if not holder.reloading:
            self.masks.forget(holder.name)
            self._follow(holder)
        self.holders.put(holder)
        return True

    def _continue_epoch(
        self, known: KnownHolder, entry: LogEntry, now_s: float, on_change: Callable[[PodId, BlockChange], None]
    ) -> bool:
        expected = known.seq if entry.kind is EntryKind.BEAT else known.seq + 1
        if entry.seq > expected:
            return False
        known.last_seen_s = now_s
        known.complete = entry.complete
        if entry.kind is EntryKind.BEAT or entry.seq < expected:
            return True
        known.seq = entry.seq
        name = _collected_name(known.name) if known.reloading else known.name
        types = len(known.rule.types) if known.rule else 1
        for change in entry.changes:
            if change.layer >= types:
                continue
            self.masks.apply(name, change)
            if pod := self.holders.pod_ids.get(known.name):
                on_change(pod, change)
            if not change.held and not known.reloading and not change.layer:
                self.evicted[known.generation.model].evicted(name, change, self.masks.held(name))
        if entry.kind is EntryKind.SEAL and known.reloading:
            known.reloading = False
            self.masks.rename(_collected_name(known.name), known.name)
            self._follow(known)
        return True

    def learn(self, pod: PodId, habits: CacheHabits) -> None:
        """A test has shown this of the pod's cache."""
        self.holders.learn(pod, habits)
        if (known := self.holders.publisher_of(pod)) is not None:
            self._follow(known)

    def _follow(self, known: KnownHolder) -> None:
        if (rule := self.holders.rule(known)) is not None:
            self.masks.follow(known.name, rule)

    # --- reading a holder again ---

    def begin_copy(self, generation: Generation, holder: HolderId) -> None:
        """Start to collect the holder's blocks; its current blocks stay readable meanwhile."""
        self.masks.forget(_collected_name(holder_name(generation, holder)))

    def copy(
        self, generation: Generation, holder: HolderId, tier: Tier, blocks: Sequence[BlockHash], layer: int = 0
    ) -> None:
        """Add some of the blocks that were read; a block may occur in several calls."""
        self.masks.apply(_collected_name(holder_name(generation, holder)), BlockChange(tier, True, blocks, layer))

    def restore(self, holder: KnownHolder) -> None:
        """Replace the holder and its blocks by what was collected."""
        self.masks.rename(_collected_name(holder.name), holder.name)
        self._follow(holder)
        self.holders.put(holder)

    # --- removal and expiry ---

    def drop(self, holder: KnownHolder) -> None:
        self.masks.forget(holder.name)
        self.masks.forget(_collected_name(holder.name))
        self.evicted[holder.generation.model].holds(holder.name, 0)
        self.holders.drop(holder.name)

    def expire(self, now_s: float) -> list[KnownHolder]:
        """Drop and return the first `MAX_EXPIRED` holders without log entries for their TTL."""
        silent = (known for known in self.holders if now_s - known.last_seen_s > self._holder_ttl_s)
        expired = [*islice(silent, MAX_EXPIRED)]
        for known in expired:
            self.drop(known)
        return expired

    def reset_expiry(self, now_s: float) -> None:
        """Restart the TTL of every holder, after a time in which the log could not be read."""
        for known in self.holders:
            known.last_seen_s = now_s


def _collected_name(name: HolderName) -> HolderName:
    """The name of a holder whose blocks are collected; they replace those of `name` once all of them have arrived."""
    return f"{name}\n+"
