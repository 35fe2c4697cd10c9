"""Which blocks does one engine hold, and which KV events does it publish?

Adds to `BlockCache` the chain hashes of full blocks, several copies of one block, and an event for every change. As in
vLLM, a fully cached prompt computes its last block again, into a second copy (docs/engines.md#what-they-mean). Events
are queued until `take_events`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

import xxhash

from loadtest.engine_model.block_cache import BlockCache
from router.hashing import hash_blocks
from router.types import BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

_ENGINE_SEED = 0x6D6F636B
"""Makes these chains differ from the router's, so that no code can rely on both being equal."""


def chain_seed(adapter: str, salt: str) -> BlockHash:
    """The root of an engine's hash chain. Another adapter or salt gives another root, so blocks never match across."""
    return xxhash.xxh3_64_intdigest(f"{len(adapter)}:{adapter}{salt}".encode("utf-8", "surrogatepass"), _ENGINE_SEED)


@dataclass(slots=True)
class PodBlockTable:
    """One request's tokens and the ids of their physical blocks, in order."""

    tokens: array[int]
    adapter: str = ""
    salt: str = ""
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    matchable_blocks: int = 0
    """Leading full blocks that other requests can find."""
    hashes: list[BlockHash] = field(default_factory=list)
    checkpoints: Collection[int] = ()
    """Where windows and states keep what a hit needs."""

    def hash_up_to(self, blocks: int, block_size_tokens: int, ahead_tokens: int = 0) -> None:
        """Extend `hashes` to the first `blocks` full blocks. Each block is hashed once, with the next tokens."""
        while (known := len(self.hashes)) < blocks:
            parent = self.hashes[-1] if known else chain_seed(self.adapter, self.salt)
            end = known + 1 if ahead_tokens else blocks
            fresh = self.tokens[known * block_size_tokens : end * block_size_tokens + ahead_tokens]
            self.hashes += hash_blocks(fresh, block_size_tokens + ahead_tokens, parent)


class BlockPool:
    """The physical blocks of one engine: a `BlockCache` that counts in blocks, with block ids as its keys."""

    def __init__(self, num_blocks: int, block_size_tokens: int, ahead_tokens: int = 0, group: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._ahead_tokens = ahead_tokens
        """A block is found again only with the same tokens behind it."""
        self._group = group
        """The number of full attention in events."""
        self._cache = BlockCache(num_blocks)
        self._ids = count()
        self._hash_of: dict[int, BlockHash] = {}
        self._copies: dict[BlockHash, list[int]] = {}
        self._events: list[KvEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds. Many of them may still be matchable."""
        return self._cache.available_tokens

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def usage(self) -> float:
        """0..1, as `vllm:kv_cache_usage_perc` counts it."""
        return self._cache.usage

    @property
    def copies(self) -> Mapping[BlockHash, int]:
        """The number of physical copies of every matchable block: the truth that an index tries to follow."""
        return {block_hash: len(blocks) for block_hash, blocks in self._copies.items()}

    def match(self, table: PodBlockTable) -> list[int]:
        """The physical blocks of the longest cached prefix of `table`.

        At most floor((n - 1) / B) blocks, because the last token must be computed to produce the next one.
        """
        limit = self._hashable_blocks(table, len(table.tokens) - 1)
        table.hash_up_to(limit, self.block_size_tokens, self._ahead_tokens)
        held = self.leading_blocks(table.hashes[:limit])
        return [self._copies[block_hash][0] for block_hash in table.hashes[:held]]

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> int:
        return sum(1 for _ in takewhile(self._copies.__contains__, hashes))

    def admit(self, table: PodBlockTable, found: list[int], new_tokens: int) -> bool:
        """Start `table` on the blocks that `match` found, with memory for `new_tokens` after them.

        False, and nothing changed, without enough free blocks.
        """
        cached_tokens = len(found) * self.block_size_tokens
        new_blocks = self._blocks_for(cached_tokens + new_tokens) - len(found)
        if new_blocks > self.free_blocks - self._cache.free_tokens_of(found):
            return False
        self._cache.pin(found)
        table.blocks = list(found)
        table.matchable_blocks = len(found)
        table.computed_tokens = cached_tokens
        return self.grow(table, cached_tokens + new_tokens)

    def missing_blocks(self, table: PodBlockTable, total_tokens: int) -> int:
        """Blocks that `table` lacks for its first `total_tokens`."""
        return self._blocks_for(total_tokens) - len(table.blocks)

    def grow(self, table: PodBlockTable, total_tokens: int) -> bool:
        """Give `table` blocks for its first `total_tokens`. False, and nothing changed, without enough free blocks."""
        missing = max(self.missing_blocks(table, total_tokens), 0)
        if missing > self.free_blocks:
            return False
        table.blocks += self._allocate(missing)
        return True

    def commit(self, table: PodBlockTable, computed_tokens: int) -> None:
        """The first `computed_tokens` of `table` are computed: its newly full blocks become matchable."""
        table.computed_tokens = computed_tokens
        first, full = table.matchable_blocks, self._hashable_blocks(table, computed_tokens)
        if full <= first:
            return
        table.hash_up_to(full, self.block_size_tokens, self._ahead_tokens)
        for block, block_hash in zip(table.blocks[first:full], table.hashes[first:full], strict=True):
            self._cache.commit(block, 1)
            self._hash_of[block] = block_hash
            self._copies.setdefault(block_hash, []).append(block)
        table.matchable_blocks = full
        self._events.append(self._stored(table, first, full))

    def release(self, table: PodBlockTable) -> None:
        """Take all blocks from `table`, its last one first in line for reuse. Matchable ones stay until then.

        As in vLLM, a block without a hash joins the same queue: blocks freed earlier are reused before it."""
        for block in table.blocks[table.matchable_blocks :]:
            self._cache.commit(block, 1)
        self._cache.release(table.blocks)
        table.blocks = []
        table.matchable_blocks = table.computed_tokens = 0

    def clear(self) -> bool:
        """Evict every cached block. False, and nothing changed, while a request holds a block."""
        if self.used_blocks:
            return False
        self._cache = BlockCache(self.num_blocks)
        self._copies.clear()
        self._hash_of.clear()
        self._events.append(BlocksCleared())
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        """The events since the last call, in order: a removal precedes the store that needed its memory."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _hashable_blocks(self, table: PodBlockTable, tokens: int) -> int:
        """Full blocks of the first `tokens`, with the tokens behind them that are hashed, too."""
        return min(tokens, len(table.tokens) - self._ahead_tokens) // self.block_size_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    def _allocate(self, blocks: int) -> list[int]:
        """New blocks, in the memory of those freed longest ago."""
        self._cache.allocate(blocks)
        for block in self._cache.take_evicted():
            self._forget(block)
        return [next(self._ids) for _ in range(blocks)]

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        copies = self._copies[block_hash]
        copies.remove(block)
        if not copies:
            del self._copies[block_hash]
        self._events.append(BlocksRemoved(block_hashes=(block_hash,), group=self._group))

    def _stored(self, table: PodBlockTable, first: int, full: int) -> BlocksStored:
        """As in vLLM, only the first block of a chain carries the salt; every event carries the adapter."""
        size, ahead = self.block_size_tokens, self._ahead_tokens
        behind = [table.tokens[end * size : end * size + ahead] for end in range(first + 1, full + 1) if ahead]
        return BlocksStored(
            block_hashes=tuple(table.hashes[first:full]),
            parent_hash=table.hashes[first - 1] if first else None,
            tokens=tuple(table.tokens[first * size : full * size]),
            lookahead_tokens=tuple(map(tuple, behind)),
            block_size_tokens=size,
            group=self._group,
            adapter=table.adapter,
            salt="" if first else table.salt,
        )
