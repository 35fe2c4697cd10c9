"""What does one holder's cache contain, by what the holder itself announces?

Engine hashes are opaque: every stored block is hashed anew from its tokens, seeded by the holder's generation, so that
engines of any kind, algorithm, seed and version meet in one index, and a block of another generation cannot match. An
engine block may be a whole multiple of the router's. Engines announce physical copies; what comes out are changes of
whether a router block is held in a tier at all. This file knows nothing of sequence numbers or sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.shards import SHARDS, Shards, shards
from router.types import BlockChange, BlockHash, BlocksRemoved, BlocksStored, Generation, Tier

_COUNT_BITS = 16
_COUNT = (1 << _COUNT_BITS) - 1
_ONE = 1 << _COUNT_BITS * Tier.GPU

_TIERS_OF = tuple(tuple(tier for tier in Tier if bits >> tier & 1) for bits in range(1 << len(Tier)))

Blocks = tuple[BlockHash, ...]
Elsewhere = Callable[[int], Blocks | None]
"""The router blocks behind an engine hash that other holders have announced with its tokens."""


class HolderBlocks:
    """One holder's blocks, by its own engine hashes. `apply` its events in order.

    `elsewhere` is asked for hashes that come without tokens and are new here, as cache stores announce them."""

    def __init__(self, generation: Generation, elsewhere: Elsewhere | None = None) -> None:
        self.generation = generation
        self.orphans = 0
        """Stored blocks that could not be placed because their parent or their tokens are unknown."""
        self.refused = ""
        """Why this holder's events cannot be indexed, or ""."""
        self._elsewhere = elsewhere
        self._blocks: Shards[int, Blocks] = shards()
        """Engine hash to the router blocks that one engine block consists of."""
        self._copies: Shards[int, int] = shards()
        """Engine hash to how many physical copies it has, 16 bits a tier, where that is not one in the GPU, as of most:
        engines announce a hash once for each.

        vLLM requests with `kv_cache_report_mode=full` announce hits as well. They look the same and so are counted as
        copies: such blocks outlive their removal here."""
        self._standing = Counter[tuple[BlockHash, Tier]]()
        """Router blocks that stand under several engine hashes at once: under how many beyond the first."""
        self._held: Shards[BlockHash, int] = shards()
        """Router block to its tiers, a bit each."""
        self._waiting: dict[tuple[int, Tier], int] = {}
        """Copies of engine hashes that `elsewhere` does not know yet."""
        self._groups: set[int] = set()
        """Attention groups whose blocks were stored here; removals of any other are not ours."""

    def blocks_of(self, engine_hash: int) -> Blocks | None:
        """The router blocks behind an engine hash of this holder."""
        return self._blocks[engine_hash % SHARDS].get(engine_hash)

    def held(self) -> dict[Tier, list[BlockHash]]:
        """Everything that is held."""
        by_tier: dict[Tier, list[BlockHash]] = {}
        for shard in self._held:
            for block, tiers in shard.items():
                for tier in _TIERS_OF[tiers]:
                    by_tier.setdefault(tier, []).append(block)
        return by_tier

    def apply(self, event: BlocksStored | BlocksRemoved) -> list[BlockChange]:
        """Take over one event. Returns what has changed by it, in order; no block twice in one change."""
        return self._remove(event) if isinstance(event, BlocksRemoved) else self._store(event)

    def retry(self) -> list[BlockChange]:
        """Ask `elsewhere` again for what it did not know: a store may be heard before the pods that fill it."""
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, {}
        changes: list[BlockChange] = []
        for (engine_hash, tier), group in waiting.items():
            event = BlocksStored(
                block_hashes=(engine_hash,), parent_hash=None, tokens=(), block_size_tokens=0, tier=tier, group=group
            )
            changes += self._store(event)
        return changes

    def shed(self) -> bool:
        """Let go of one more shard, for good: True once none is left. A million blocks at once take 50 ms to free."""
        for known in (self._blocks, self._copies, self._held):
            known.pop()
        return not self._held

    # --- storing ---

    def _store(self, event: BlocksStored) -> list[BlockChange]:
        self._groups.add(event.group)
        fresh: list[BlockHash] = []
        one = 1 << _COUNT_BITS * event.tier
        for engine_hash, blocks in self._named(event):
            shard = engine_hash % SHARDS
            known, counted = self._blocks[shard], self._copies[shard]
            copies = counted.get(engine_hash, _ONE) if engine_hash in known else 0
            # Engines that are asked to report hits in full announce them again and again.
            if copies // one & _COUNT < _COUNT and copies + one != _ONE:
                counted[engine_hash] = copies + one
            if not copies // one & _COUNT:
                # A hash that already stands for blocks keeps them, even if an engine that does not hash all that
                # tells caches apart now announces others under it: a removal must take away what was added.
                self._add(known.setdefault(engine_hash, blocks), event.tier, fresh)
        return [BlockChange(event.tier, True, fresh)] if fresh else []

    def _named(self, event: BlocksStored) -> Iterable[tuple[int, Blocks]]:
        """Engine hashes of a stored event with their router blocks, as far as these can be known."""
        if not event.tokens:
            return self._known(event)
        block_size = self.generation.block_size_tokens
        if event.block_size_tokens % block_size:
            self.refused = (
                f"its blocks of {event.block_size_tokens} tokens are no multiple of the router's {block_size}"
            )
            return ()
        parent = self._parent(event)
        if parent is None:
            self.orphans += len(event.block_hashes)
            return ()
        hashes = hash_blocks(token_array(event.tokens), block_size, parent)
        each = event.block_size_tokens // block_size
        return zip(event.block_hashes, zip(*[iter(hashes)] * each, strict=True), strict=False)

    def _known(self, event: BlocksStored) -> Iterable[tuple[int, Blocks]]:
        """A placeholder: blocks announced before now also lie in this tier."""
        for engine_hash in event.block_hashes:
            blocks = self.blocks_of(engine_hash)
            if blocks is None and self._elsewhere is not None:
                blocks = self._elsewhere(engine_hash)
            if blocks is not None:
                yield engine_hash, blocks
            elif self._elsewhere is not None:
                self._waiting[engine_hash, event.tier] = event.group
            else:
                self.orphans += 1

    def _parent(self, event: BlocksStored) -> BlockHash | None:
        if event.parent_hash is None:
            return generation_seed(replace(self.generation, adapter=event.adapter, salt=event.salt))
        blocks = self.blocks_of(event.parent_hash)
        return blocks[-1] if blocks else None

    def _add(self, blocks: Blocks, tier: Tier, fresh: list[BlockHash]) -> None:
        bit = 1 << tier
        for block in blocks:
            held = self._held[block % SHARDS]
            tiers = held.get(block, 0)
            if tiers & bit:
                self._standing[block, tier] += 1
            else:
                held[block] = tiers | bit
                fresh.append(block)

    # --- removing ---

    def _remove(self, event: BlocksRemoved) -> list[BlockChange]:
        if event.group not in self._groups:
            return []
        shift = _COUNT_BITS * event.tier
        gone: list[BlockHash] = []
        for engine_hash in event.block_hashes:
            self._waiting.pop((engine_hash, event.tier), None)
            shard = engine_hash % SHARDS
            known, counted = self._blocks[shard], self._copies[shard]
            copies = counted.get(engine_hash, _ONE) if engine_hash in known else 0
            if not copies >> shift & _COUNT:
                continue
            copies -= 1 << shift
            if not copies >> shift & _COUNT:
                self._drop(known[engine_hash], event.tier, gone)
            if not copies:
                del known[engine_hash]
            if copies > _ONE:
                counted[engine_hash] = copies
            else:
                counted.pop(engine_hash, None)
        return [BlockChange(event.tier, False, gone)] if gone else []

    def _drop(self, blocks: Blocks, tier: Tier, gone: list[BlockHash]) -> None:
        for block in blocks:
            if standing := self._standing.pop((block, tier), 0):
                if standing > 1:
                    self._standing[block, tier] = standing - 1
                continue
            gone.append(block)
            held = self._held[block % SHARDS]
            if tiers := held[block] & ~(1 << tier):
                held[block] = tiers
            else:
                del held[block]
