"""The prefix cache of one pod: reference counts, and eviction of the least recently freed block.

It counts in tokens, so a block may be of any size; `block_pool.py` counts in physical blocks instead. A freed block
stays matchable until its memory is needed, and a request frees its last block first, so shared prefixes live longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, takewhile

from router.types import BlockHash


class BlockCache:
    """Pinned blocks, free but matchable blocks, and private tokens that no other request can match."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.unused_tokens = capacity_tokens
        """Neither pinned, nor matchable, nor private."""
        self.free_tokens = 0
        """Tokens of matchable blocks that no request pins."""
        self._tokens: dict[BlockHash, int] = {}
        self._known: Mapping[BlockHash, object] = self._tokens
        """The matchable blocks."""
        self._pins: dict[BlockHash, int] = {}
        self._free: OrderedDict[BlockHash, None] = OrderedDict()
        self._evicted: list[BlockHash] = []

    @property
    def blocks(self) -> Iterable[BlockHash]:
        return self._known.keys()

    @property
    def available_tokens(self) -> int:
        """Tokens that can be allocated, if every block that is not pinned is evicted."""
        return self.unused_tokens + self.free_tokens

    @property
    def usage(self) -> float:
        """The share that requests hold, 0..1, as `vllm:kv_cache_usage_perc` counts it."""
        return 1 - self.available_tokens / self.capacity_tokens

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._known

    def leading_blocks(self, blocks: Iterable[BlockHash]) -> int:
        return sum(1 for _ in takewhile(self._known.__contains__, blocks))

    def free_tokens_of(self, blocks: Iterable[BlockHash]) -> int:
        """Tokens of those matchable blocks that no request pins."""
        free, tokens = self._free, self._tokens
        return sum(tokens[block] for block in blocks if block in free)

    def pin(self, blocks: Iterable[BlockHash]) -> None:
        """Protect matchable blocks from eviction, until `release`."""
        for block in blocks:
            pins = self._pins.get(block, 0)
            self._pins[block] = pins + 1
            if not pins:
                del self._free[block]
                self.free_tokens -= self._tokens[block]

    def allocate(self, tokens: int) -> None:
        """Allocate private tokens, evicting the blocks freed longest ago. The caller checks `available_tokens`."""
        self.unused_tokens -= tokens
        while self.unused_tokens < 0:
            block, _ = self._free.popitem(last=False)
            size = self._tokens.pop(block)
            self.free_tokens -= size
            self.unused_tokens += size
            self._evict(block)

    def _evict(self, block: BlockHash) -> None:
        self._evicted.append(block)

    def free(self, tokens: int) -> None:
        self.unused_tokens += tokens

    def commit(self, block: BlockHash, tokens: int) -> bool:
        """Turn private tokens into a pinned, matchable block.

        False if the block is matchable already: then it is pinned, and the private tokens are freed."""
        known = block in self._tokens
        if known:
            self.unused_tokens += tokens
            self.pin((block,))
        else:
            self._tokens[block] = tokens
            self._pins[block] = 1
        return not known

    def release(self, blocks: Sequence[BlockHash]) -> None:
        """Unpin blocks. Of these, the last is evicted first."""
        for block in reversed(blocks):
            pins = self._pins.pop(block) - 1
            if pins:
                self._pins[block] = pins
            else:
                self._free[block] = None
                self.free_tokens += self._tokens[block]

    def take_evicted(self) -> list[BlockHash]:
        """The blocks evicted since the last call, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted


class CopyingCache(BlockCache):
    """Like an engine, keeps a block that is computed again as a second copy. The one that was stored first is found."""

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._copies: dict[BlockHash, list[int]] = {}
        """The ids of each block's copies, under which all else is kept here."""
        self._known = self._copies
        self._block_of: dict[int, BlockHash] = {}
        self._ids = count()

    def free_tokens_of(self, blocks: Iterable[BlockHash]) -> int:
        return super().free_tokens_of([self._copies[block][0] for block in blocks])

    def pin(self, blocks: Iterable[BlockHash]) -> None:
        super().pin([self._copies[block][0] for block in blocks])

    def commit(self, block: BlockHash, tokens: int) -> bool:
        copy, copies = next(self._ids), self._copies.setdefault(block, [])
        self._block_of[copy] = block
        copies.append(copy)
        super().commit(copy, tokens)
        return len(copies) == 1

    def release(self, blocks: Sequence[BlockHash]) -> None:
        for block in reversed(blocks):
            super().release([next(filter(self._pins.__contains__, reversed(self._copies[block])))])

    def _evict(self, block: BlockHash) -> None:
        original = self._block_of.pop(block)
        self._copies[original].remove(block)
        if not self._copies[original]:
            del self._copies[original]
            super()._evict(original)


class TierCache:
    """A tier below the pod's own memory, such as CPU DRAM. It evicts the least recently used block."""

    def __init__(self, capacity_tokens: int) -> None:
        self._unused_tokens = capacity_tokens
        self._tokens: OrderedDict[BlockHash, int] = OrderedDict()

    @property
    def blocks(self) -> Iterable[BlockHash]:
        return self._tokens.keys()

    def leading_blocks(self, blocks: Iterable[BlockHash]) -> int:
        return sum(1 for _ in takewhile(self._tokens.__contains__, blocks))

    def touch(self, blocks: Sequence[BlockHash]) -> None:
        """Mark blocks as read. Of these, the last is evicted first."""
        for block in reversed(blocks):
            self._tokens.move_to_end(block)

    def put(self, block: BlockHash, tokens: int) -> tuple[bool, list[BlockHash]]:
        """Write a block. Returns whether it is new, and the evicted blocks: itself if it is larger than the tier."""
        if block in self._tokens:
            self._tokens.move_to_end(block)
            return False, []
        self._tokens[block] = tokens
        self._unused_tokens -= tokens
        evicted: list[BlockHash] = []
        while self._unused_tokens < 0:
            oldest, size = self._tokens.popitem(last=False)
            self._unused_tokens += size
            evicted.append(oldest)
        return True, evicted
