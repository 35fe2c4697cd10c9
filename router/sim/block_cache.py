"""Which blocks does one simulated pod hold, and what must go when it needs room?

The same rules as `sim/block_pool.py` (reference counts, least recently freed first, tails before heads), counted in
tokens instead of kept block by block, so that a block may be of any size. This file never schedules anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from router.types import BlockHash


class BlockCache:
    """Pinned blocks, free but matchable blocks, and private tokens that nobody can match."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.unused_tokens = capacity_tokens
        """Neither pinned, nor matchable, nor private."""
        self.free_tokens = 0
        """Of blocks that are matchable and under no request."""
        self._tokens: dict[BlockHash, int] = {}
        self._pins: dict[BlockHash, int] = {}
        self._free: OrderedDict[BlockHash, None] = OrderedDict()
        self._evicted: list[BlockHash] = []

    @property
    def blocks(self) -> Iterable[BlockHash]:
        """All that can be found here."""
        return self._tokens.keys()

    @property
    def available_tokens(self) -> int:
        """Room for what is new, once everything matchable but unpinned is gone."""
        return self.unused_tokens + self.free_tokens

    @property
    def usage(self) -> float:
        """0..1, as `vllm:kv_cache_usage_perc` counts it: what requests hold."""
        return 1 - self.available_tokens / self.capacity_tokens

    def leading_blocks(self, blocks: Iterable[BlockHash]) -> int:
        """How many leading blocks are here."""
        return sum(1 for _ in takewhile(self._tokens.__contains__, blocks))

    def free_tokens_of(self, blocks: Iterable[BlockHash]) -> int:
        """Tokens of those blocks that nobody pins."""
        free, tokens = self._free, self._tokens
        return sum(tokens[block] for block in blocks if block in free)

    def pin(self, blocks: Iterable[BlockHash]) -> None:
        """Hold blocks that are here."""
        for block in blocks:
            pins = self._pins.get(block, 0)
            self._pins[block] = pins + 1
            if not pins:
                del self._free[block]
                self.free_tokens -= self._tokens[block]

    def allocate(self, tokens: int) -> None:
        """Make so many tokens private, evicting what was freed longest ago. There must be room."""
        self.unused_tokens -= tokens
        while self.unused_tokens < 0:
            block, _ = self._free.popitem(last=False)
            size = self._tokens.pop(block)
            self.free_tokens -= size
            self.unused_tokens += size
            self._evicted.append(block)

    def free(self, tokens: int) -> None:
        """Private tokens are no longer needed."""
        self.unused_tokens += tokens

    def commit(self, block: BlockHash, tokens: int) -> bool:
        """So many private tokens are that block now, and pinned. False where it was here already: the copy is given
        back, and the one that is here is pinned."""
        known = block in self._tokens
        if known:
            self.unused_tokens += tokens
            self.pin((block,))
        else:
            self._tokens[block] = tokens
            self._pins[block] = 1
        return not known

    def release(self, blocks: Sequence[BlockHash]) -> None:
        """Let pinned blocks go, the last first in line for eviction."""
        for block in reversed(blocks):
            pins = self._pins.pop(block) - 1
            if pins:
                self._pins[block] = pins
            else:
                self._free[block] = None
                self.free_tokens += self._tokens[block]

    def take_evicted(self) -> list[BlockHash]:
        """What had to go since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted


class TierCache:
    """A tier behind the pod's own memory: least recently written first out. Nothing in it is ever pinned."""

    def __init__(self, capacity_tokens: int) -> None:
        self._room_tokens = capacity_tokens
        self._tokens: OrderedDict[BlockHash, int] = OrderedDict()

    @property
    def blocks(self) -> Iterable[BlockHash]:
        """All that can be found here."""
        return self._tokens.keys()

    def leading_blocks(self, blocks: Iterable[BlockHash]) -> int:
        """How many leading blocks are here."""
        return sum(1 for _ in takewhile(self._tokens.__contains__, blocks))

    def touch(self, blocks: Sequence[BlockHash]) -> None:
        """They were read; the first stays longest."""
        for block in reversed(blocks):
            self._tokens.move_to_end(block)

    def put(self, block: BlockHash, tokens: int) -> tuple[bool, list[BlockHash]]:
        """Write a block. Whether it is new here, and what had to go for it: itself where it is larger than the tier."""
        if block in self._tokens:
            self._tokens.move_to_end(block)
            return False, []
        self._tokens[block] = tokens
        self._room_tokens -= tokens
        gone: list[BlockHash] = []
        while self._room_tokens < 0:
            oldest, size = self._tokens.popitem(last=False)
            self._room_tokens += size
            gone.append(oldest)
        return True, gone
