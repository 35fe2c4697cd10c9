"""Who holds which blocks, by what the engines themselves announce?

Engine hashes are opaque: every stored block is hashed anew from its tokens, seeded by the holder's generation, so that
engines of any kind, algorithm, seed and version meet in one map, and a block of another generation cannot match. An
engine block may be a whole multiple of the router's. This file knows nothing of sequence numbers or sockets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.masks import HolderMasks
from router.types import (
    BlockHash,
    BlocksByTier,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Generation,
    KvEvent,
    PodId,
    PromptPrefix,
    Tier,
)

_COUNT_BITS = 16
_COUNT = (1 << _COUNT_BITS) - 1

Blocks = tuple[BlockHash, ...]


@dataclass(slots=True)
class _Holder:
    """What is remembered of one holder, by its own engine hashes."""

    slot: int
    generation: Generation
    blocks: dict[int, Blocks] = field(default_factory=dict)
    """Engine hash to the router blocks that one engine block consists of."""
    copies: dict[int, int] = field(default_factory=dict)
    """Engine hash to how many physical copies it has, 16 bits a tier: engines announce a hash once for each.

    vLLM requests with `kv_cache_report_mode=full` announce hits as well. They look the same and so are counted as
    copies: such blocks outlive their removal here."""
    doubles: Counter[tuple[BlockHash, Tier]] = field(default_factory=Counter)
    """Router blocks that stand under several engine hashes at once, beyond the first."""
    groups: set[int] = field(default_factory=set)
    """Attention groups whose blocks were stored here; removals of any other are not ours."""
    orphans: int = 0
    refused: str = ""


class BlockMap:
    """All holders' blocks. `apply` events in order, `match` prompts."""

    def __init__(self) -> None:
        self._masks = HolderMasks()
        self._holders: dict[PodId, _Holder] = {}
        self._block_holders = 0

    @property
    def block_holders(self) -> int:
        """Pairs of (block, holder and tier) in the map."""
        return self._block_holders

    def add_holder(self, pod: PodId, generation: Generation) -> None:
        """Begin a (new) life of `pod`'s cache, empty."""
        self.forget(pod)
        self._holders[pod] = _Holder(self._masks.slot(pod), generation)

    def forget(self, pod: PodId) -> None:
        """Drop everything of `pod`. O(its blocks)."""
        holder = self._holders.pop(pod, None)
        if holder is not None:
            self._block_holders -= self._held(holder)
            self._masks.forget(pod, (block for blocks in holder.blocks.values() for block in blocks))

    def orphans(self, pod: PodId) -> int:
        """Stored blocks of `pod` that could not be placed because their parent is unknown."""
        holder = self._holders.get(pod)
        return holder.orphans if holder else 0

    def refused(self, pod: PodId) -> str:
        """Why `pod`'s events cannot be indexed, or ""."""
        holder = self._holders.get(pod)
        return holder.refused if holder else ""

    def apply(self, pod: PodId, event: KvEvent) -> None:
        """Take over one event of a known holder; events of others are ignored."""
        holder = self._holders.get(pod)
        if holder is None:
            return
        if isinstance(event, BlocksStored):
            self._store(holder, event)
        elif isinstance(event, BlocksRemoved):
            self._remove(holder, event)
        elif isinstance(event, BlocksCleared):
            self.add_holder(pod, holder.generation)

    def match(self, prefix: PromptPrefix) -> dict[PodId, BlocksByTier]:
        """Leading blocks of `prefix` by holder and tier."""
        return self._masks.walk(prefix.hashes)

    # --- storing ---

    def _store(self, holder: _Holder, event: BlocksStored) -> None:
        holder.groups.add(event.group)
        if not event.tokens:
            self._store_known(holder, event)
            return
        block_size = holder.generation.block_size_tokens
        if event.block_size_tokens % block_size:
            holder.refused = (
                f"its blocks of {event.block_size_tokens} tokens are no multiple of the router's {block_size}"
            )
            return
        parent = self._parent(holder, event)
        if parent is None:
            holder.orphans += len(event.block_hashes)
            return
        hashes = hash_blocks(token_array(event.tokens), block_size, parent)
        each = event.block_size_tokens // block_size
        for number, engine_hash in enumerate(event.block_hashes):
            self._add_copy(holder, engine_hash, tuple(hashes[number * each : (number + 1) * each]), event.tier)

    def _store_known(self, holder: _Holder, event: BlocksStored) -> None:
        """A placeholder: blocks announced before now also lie in this tier."""
        for engine_hash in event.block_hashes:
            blocks = holder.blocks.get(engine_hash)
            if blocks is None:
                holder.orphans += 1
            else:
                self._add_copy(holder, engine_hash, blocks, event.tier)

    def _parent(self, holder: _Holder, event: BlocksStored) -> BlockHash | None:
        if event.parent_hash is None:
            return generation_seed(replace(holder.generation, adapter=event.adapter, salt=event.salt))
        blocks = holder.blocks.get(event.parent_hash)
        return blocks[-1] if blocks else None

    def _add_copy(self, holder: _Holder, engine_hash: int, blocks: Blocks, tier: Tier) -> None:
        shift = _COUNT_BITS * tier
        copies = holder.copies.get(engine_hash, 0)
        in_tier = copies >> shift & _COUNT
        if in_tier < _COUNT:  # engines asked to report hits in full announce them again and again
            holder.copies[engine_hash] = copies + (1 << shift)
        if in_tier:
            return
        # A hash that already stands for blocks keeps them, even if an engine that does not hash all that tells
        # caches apart now announces others under it: what a removal takes away must be what was added.
        for block in holder.blocks.setdefault(engine_hash, blocks):
            if self._masks.has(holder.slot, block, tier):
                holder.doubles[block, tier] += 1
            else:
                self._masks.add(holder.slot, block, tier)
                self._block_holders += 1

    # --- removing ---

    def _remove(self, holder: _Holder, event: BlocksRemoved) -> None:
        if event.group not in holder.groups:
            return
        shift = _COUNT_BITS * event.tier
        for engine_hash in event.block_hashes:
            copies = holder.copies.get(engine_hash, 0)
            if not copies >> shift & _COUNT:
                continue
            copies -= 1 << shift
            if not copies >> shift & _COUNT:
                self._drop(holder, holder.blocks[engine_hash], event.tier)
            if copies:
                holder.copies[engine_hash] = copies
            else:
                del holder.copies[engine_hash], holder.blocks[engine_hash]

    def _drop(self, holder: _Holder, blocks: Blocks, tier: Tier) -> None:
        for block in blocks:
            if holder.doubles[block, tier] > 0:
                holder.doubles[block, tier] -= 1
            else:
                self._masks.remove(holder.slot, block, tier)
                self._block_holders -= 1
                del holder.doubles[block, tier]

    def _held(self, holder: _Holder) -> int:
        tiers_held = sum(
            len(holder.blocks[engine_hash]) * sum(bool(copies >> _COUNT_BITS * tier & _COUNT) for tier in Tier)
            for engine_hash, copies in holder.copies.items()
        )
        return tiers_held - holder.doubles.total()
