"""Which blocks does one engine hold, and what does it announce about them?

A fixed pool of physical blocks with reference counts, chain hashes of full blocks, and a queue of free blocks, oldest
first. A freed block stays matchable until it is handed out again, and a request frees its tail first, so that shared
beginnings live longest. The rules are vLLM's (reference/protocols.md 1.5). This file never schedules anything and never
reads a clock; what it has to announce waits until the caller takes it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from router.hashing import hash_blocks
from router.types import BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

_ENGINE_SEED = 0x6D6F636B
"""Sets these chains apart from the router's: nobody may come to rely on both being equal."""


def chain_seed(adapter: str, salt: str) -> BlockHash:
    """The root of an engine's hash chain: what an adapter or a salt computes is nobody else's to match."""
    return xxhash.xxh3_64_intdigest(f"{len(adapter)}:{adapter}{salt}".encode("utf-8", "surrogatepass"), _ENGINE_SEED)


@dataclass(slots=True)
class PodBlockTable:
    """One request's tokens and the physical blocks that lie under them, in order."""

    tokens: array[int]
    adapter: str = ""
    salt: str = ""
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    matchable_blocks: int = 0
    """Leading full blocks that other requests can find."""
    hashes: list[BlockHash] = field(default_factory=list)
    garbled: bool = False
    """Some KV under it is not of these tokens; so is all that is computed on top of it."""

    def hash_up_to(self, blocks: int, block_size_tokens: int) -> None:
        """Make `hashes` cover at least the first `blocks` full blocks; those known are not hashed again."""
        known = len(self.hashes)
        if known < blocks:
            parent = self.hashes[-1] if known else chain_seed(self.adapter, self.salt)
            fresh = self.tokens[known * block_size_tokens : blocks * block_size_tokens]
            self.hashes += hash_blocks(fresh, block_size_tokens, parent)


class BlockPool:
    """The block pool of one engine. `free_blocks + used_blocks == num_blocks` at all times."""

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._copies: dict[BlockHash, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._garbled: set[int] = set()
        self._events: list[KvEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks under no request: room for new ones, though many may still be matchable."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return sum(1 for count in self._references if count > 0)

    @property
    def usage(self) -> float:
        """0..1, as `vllm:kv_cache_usage_perc` counts it."""
        return 1 - len(self._free) / self.num_blocks

    @property
    def copies(self) -> Mapping[BlockHash, int]:
        """How many physical copies of every matchable block there are: the truth an index tries to follow."""
        return {block_hash: len(blocks) for block_hash, blocks in self._copies.items()}

    def match(self, table: PodBlockTable) -> list[int]:
        """The physical blocks of the longest cached prefix of `table`.

        Capped at floor((n - 1) / B) blocks, because the last token must be computed to say what follows it: a fully
        cached prompt computes its last block again, into a second copy.
        """
        limit = (len(table.tokens) - 1) // self.block_size_tokens
        table.hash_up_to(limit, self.block_size_tokens)
        held = self.leading_blocks(table.hashes[:limit])
        return [self._copies[block_hash][0] for block_hash in table.hashes[:held]]

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks are matchable before the first that is not."""
        return next((at for at, block_hash in enumerate(hashes) if block_hash not in self._copies), len(hashes))

    def admit(self, table: PodBlockTable, found: list[int], new_tokens: int) -> bool:
        """Let `table` begin on the blocks that `match` found, with room for `new_tokens` behind them.

        False, and nothing changed, where the pool lacks the room: a found block that is free cannot be both.
        """
        cached_tokens = len(found) * self.block_size_tokens
        found_free = sum(1 for block in found if not self._references[block])
        if self._blocks_under(cached_tokens + new_tokens) - len(found) > len(self._free) - found_free:
            return False
        for block in found:
            self._references[block] += 1
            self._free.pop(block, None)
        table.blocks = list(found)
        table.matchable_blocks = len(found)
        table.computed_tokens = cached_tokens
        table.garbled = not self._garbled.isdisjoint(found)
        return self.grow(table, cached_tokens + new_tokens)

    def grow(self, table: PodBlockTable, total_tokens: int) -> bool:
        """Give `table` blocks for its first `total_tokens`. False, and nothing changed, where the pool lacks them."""
        missing = self._blocks_under(total_tokens) - len(table.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            table.blocks.append(self._reuse_oldest())
        return True

    def commit(self, table: PodBlockTable, computed_tokens: int) -> None:
        """The first `computed_tokens` of `table` are computed: its newly full blocks become matchable."""
        table.computed_tokens = computed_tokens
        first, full = table.matchable_blocks, computed_tokens // self.block_size_tokens
        if full <= first:
            return
        table.hash_up_to(full, self.block_size_tokens)
        for block, block_hash in zip(table.blocks[first:full], table.hashes[first:full], strict=True):
            self._hash_of[block] = block_hash
            self._copies.setdefault(block_hash, []).append(block)
        if table.garbled:
            self._garbled.update(table.blocks[first:full])
        table.matchable_blocks = full
        self._events.append(self._stored(table, first, full))

    def release(self, table: PodBlockTable) -> None:
        """Take all blocks from `table`, the last one first in line for reuse. Nothing is gone yet, none is told."""
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
        table.blocks = []
        table.matchable_blocks = table.computed_tokens = 0

    def clear(self) -> bool:
        """Forget every cached block. False, and nothing changed, while a request holds one."""
        if len(self._free) < self.num_blocks:
            return False
        self._copies.clear()
        self._hash_of = [None] * self.num_blocks
        self._events.append(BlocksCleared())
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        """What happened since the last call, in order: a removal stands before the store that needed its room."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _blocks_under(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    def _reuse_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        self._garbled.discard(block)
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._forget(block, block_hash)
        return block

    def _forget(self, block: int, block_hash: BlockHash) -> None:
        copies = self._copies[block_hash]
        copies.remove(block)
        if not copies:
            del self._copies[block_hash]
        self._hash_of[block] = None
        self._events.append(BlocksRemoved(block_hashes=(block_hash,)))

    def _stored(self, table: PodBlockTable, first: int, full: int) -> BlocksStored:
        """Like vLLM, the salt is told only with the block that starts the chain; the adapter always."""
        size = self.block_size_tokens
        return BlocksStored(
            block_hashes=tuple(table.hashes[first:full]),
            parent_hash=table.hashes[first - 1] if first else None,
            tokens=tuple(table.tokens[first * size : full * size]),
            block_size_tokens=size,
            adapter=table.adapter,
            salt="" if first else table.salt,
        )
