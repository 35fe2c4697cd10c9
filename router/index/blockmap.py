"""Who holds which blocks, by what the engines themselves announce?

Every holder's account of its own cache (`holder.py`), and one table of all (`masks.py`) in which prompts are looked up.
This file knows nothing of sequence numbers or sockets.
"""

from __future__ import annotations

from collections import deque

from router.index.holder_blocks import HolderBlocks
from router.index.masks import HolderMasks
from router.types import BlocksByTier, BlocksCleared, Generation, KvEvent, PodId, PromptPrefix


class BlockMap:
    """All holders' blocks. `apply` events in order, `match` prompts."""

    def __init__(self) -> None:
        self._masks = HolderMasks()
        self._holders: dict[PodId, tuple[int, HolderBlocks]] = {}
        self._left: deque[HolderBlocks] = deque()
        """Of holders that are gone; a shard of theirs is freed with each event and lookup."""

    @property
    def block_holders(self) -> int:
        """Pairs of (block, holder and tier) in the map."""
        return self._masks.block_holders

    def add_holder(self, pod: PodId, generation: Generation) -> None:
        """Begin a (new) life of `pod`'s cache, empty."""
        self.forget(pod)
        self._holders[pod] = self._masks.slot(pod), HolderBlocks(generation)

    def forget(self, pod: PodId) -> None:
        """Drop everything of `pod`. O(1)."""
        found = self._holders.pop(pod, None)
        if found is not None:
            self._masks.forget(pod)
            self._left.append(found[1])

    def orphans(self, pod: PodId) -> int:
        """Stored blocks of `pod` that could not be placed because their parent is unknown."""
        found = self._holders.get(pod)
        return found[1].orphans if found else 0

    def rejected_reason(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""
        found = self._holders.get(pod)
        return found[1].refused if found else ""

    def apply(self, pod: PodId, event: KvEvent) -> None:
        """Take over one event of a known holder; events of others are ignored."""
        self._free()
        found = self._holders.get(pod)
        if found is None:
            return
        slot, holder = found
        if isinstance(event, BlocksCleared):
            self.add_holder(pod, holder.generation)
            return
        for change in holder.apply(event):
            put = self._masks.add_all if change.held else self._masks.remove_all
            put(slot, change.blocks, change.tier)

    def match(self, prefix: PromptPrefix) -> dict[PodId, BlocksByTier]:
        """Leading blocks of `prefix` by holder and tier."""
        self._free()
        return self._masks.walk(prefix.hashes)

    def _free(self) -> None:
        """The next shard."""
        if self._left and self._left[0].shed():
            self._left.popleft()
