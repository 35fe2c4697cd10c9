"""Who holds which blocks, by what everybody's publishers have written to the shared log?

The router's own copy of the cluster index. Entries come numbered by holder and epoch; one that does not follow on the
last is refused, and the holder's blocks must then be read anew (`copy`, `restore`). A newer epoch ends the one before
at once; what its publisher merely writes again stays readable until the copy is whole. Who is not heard of for a
lifetime has expired. This file knows nothing of Redis and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.index.holders import HolderFacts, HolderId, HolderName, Holders, KnownHolder, holder_name
from router.index.masks import HolderMasks
from router.index.table import SCATTER
from router.types import BlockChange, BlockHash, BlocksByTier, Generation, PodId, PromptPrefix, Tier


class EntryKind(StrEnum):
    """What an entry of the log says."""

    EMPTY = "empty"
    """A new epoch, in which the holder has nothing yet."""
    RELOAD = "reload"
    """A new epoch, in which the publisher writes again what the holder has."""
    CHANGE = "change"
    SEAL = "seal"
    """All of a reload has been written."""
    BEAT = "beat"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One entry. `seq` counts the changes of an epoch from 1; a BEAT repeats that of the last one."""

    kind: EntryKind
    holder: HolderId
    epoch: int
    seq: int = 0
    complete: bool = True
    facts: HolderFacts | None = None
    """Of an EMPTY or RELOAD."""
    changes: Sequence[BlockChange] = ()


class ClusterIndex:
    """All holders of all generations that are read here. `max_bytes` bounds the table of blocks."""

    def __init__(self, *, lifetime_s: float, max_bytes: int | None = None, scatter: int = SCATTER) -> None:
        self._lifetime_s = lifetime_s
        self._masks = HolderMasks(max_bytes, scatter)
        self.holders = Holders()

    @property
    def block_holders(self) -> int:
        """Triples of (block, holder, tier)."""
        return self._masks.block_holders

    @property
    def bytes(self) -> int:
        """Memory of the table."""
        return self._masks.bytes

    @property
    def left_out(self) -> int:
        """Blocks that did not fit into `max_bytes`."""
        return self._masks.left_out

    def held(self, holder: KnownHolder) -> int:
        """How many blocks a holder has, each counted once a tier."""
        return self._masks.held(holder.name)

    def match(self, prefix: PromptPrefix) -> dict[PodId, BlocksByTier]:
        """Leading blocks of `prefix` by pod and tier."""
        return self.holders.by_pod(self._masks.walk(hashes) for _, hashes in self.holders.hashes(prefix))

    # --- what is heard ---

    def take(self, generation: Generation, entry: LogEntry, now_s: float) -> bool:
        """Take over the next entry of a generation's log. False if the holder must be read anew."""
        known = self.holders.get(holder_name(generation, entry.holder))
        if known is not None and entry.epoch < known.epoch:
            return True  # somebody who was fenced off meanwhile
        if entry.kind is EntryKind.GONE:
            if known is not None:
                self.drop(known)
            return True
        if entry.kind in (EntryKind.EMPTY, EntryKind.RELOAD):
            return self._begin(generation, entry, known, now_s)
        if known is None or entry.epoch > known.epoch:
            return False
        return self._go_on(known, entry, now_s)

    def _begin(self, generation: Generation, entry: LogEntry, known: KnownHolder | None, now_s: float) -> bool:
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
        self._masks.forget(_copy(holder.name))
        if not holder.reloading:
            self._masks.forget(holder.name)
        self.holders.put(holder)
        return True

    def _go_on(self, known: KnownHolder, entry: LogEntry, now_s: float) -> bool:
        expected = known.seq if entry.kind is EntryKind.BEAT else known.seq + 1
        if entry.seq > expected:
            return False
        known.last_seen_s = now_s
        known.complete = entry.complete
        if entry.kind is EntryKind.BEAT or entry.seq < expected:
            return True
        known.seq = entry.seq
        self._change(_copy(known.name) if known.reloading else known.name, entry.changes)
        if entry.kind is EntryKind.SEAL and known.reloading:
            known.reloading = False
            self._masks.rename(_copy(known.name), known.name)
        return True

    def _change(self, name: HolderName, changes: Sequence[BlockChange]) -> None:
        slot = self._masks.slot(name)
        for change in changes:
            put = self._masks.add_all if change.held else self._masks.remove_all
            put(slot, change.blocks, change.tier)

    # --- reading anew ---

    def begin_copy(self, generation: Generation, holder: HolderId) -> None:
        """The holder's blocks are about to be read; what is known of it stays as it is meanwhile."""
        self._masks.forget(_copy(holder_name(generation, holder)))

    def copy(self, generation: Generation, holder: HolderId, tier: Tier, blocks: Sequence[BlockHash]) -> None:
        """Some of what was read; a block may come again in another piece."""
        self._masks.add_all(self._masks.slot(_copy(holder_name(generation, holder))), blocks, tier)

    def restore(self, holder: KnownHolder) -> None:
        """Know of this holder what was copied of it, and nothing else."""
        self._masks.rename(_copy(holder.name), holder.name)
        self.holders.put(holder)

    # --- who is no longer there ---

    def drop(self, holder: KnownHolder) -> None:
        """The holder is gone, with all it had."""
        self._masks.forget(holder.name)
        self._masks.forget(_copy(holder.name))
        self.holders.drop(holder.name)

    def expire(self, now_s: float) -> list[KnownHolder]:
        """Drop those that were not heard of for their lifetime."""
        silent = [known for known in self.holders if now_s - known.last_seen_s > self._lifetime_s]
        for known in silent:
            self.drop(known)
        return silent

    def reset_expiry(self, now_s: float) -> None:
        """Nobody could be heard until now: lifetimes begin anew."""
        for known in self.holders:
            known.last_seen_s = now_s


def _copy(name: HolderName) -> HolderName:
    """The name under which blocks are gathered until they are all there."""
    return f"{name}\n+"
