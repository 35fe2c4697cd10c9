"""The latest prompt of each recent conversation, as block hashes: a sample of what is likely to be asked for again.

`Lineage` finds which prompt continues which. Bounded in conversations and in blocks; the oldest are dropped first. This
file does not know where blocks are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from router.types import BlockHash

MAX_PROMPTS = 8192
MAX_BLOCKS = 1 << 21
"""16 MB of hashes: 33 million tokens in blocks of 16."""


class RecentPrompt(msgspec.Struct, frozen=True, gc=False):
    hashes: Sequence[BlockHash]
    at_s: float


class RecentPrompts:
    """The latest prompts by their last block, oldest first."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_prompts = max_prompts
        self._max_blocks = max_blocks
        self._prompts: OrderedDict[BlockHash, RecentPrompt] = OrderedDict()
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def put(self, hashes: Sequence[BlockHash], before: BlockHash | None, now_s: float) -> None:
        """Add a prompt. `before`: last block of the prompt that it continues, which it replaces. O(1)."""
        for tail in (before, hashes[-1]):
            known = self._prompts.pop(tail, None) if tail is not None else None
            if known is not None:
                self.blocks -= len(known.hashes)
        self._prompts[hashes[-1]] = RecentPrompt(hashes, now_s)
        self.blocks += len(hashes)
        while len(self._prompts) > self._max_prompts or (self.blocks > self._max_blocks and len(self._prompts) > 1):
            self.blocks -= len(self._prompts.popitem(last=False)[1].hashes)

    def sample(self, max_prompts: int, max_blocks: int) -> tuple[list[RecentPrompt], int]:
        """Every k-th prompt, newest first, and k: up to about this number of prompts and blocks. O(prompts)."""
        step = max(-(-self.blocks // max_blocks), -(-len(self._prompts) // max_prompts), 1)
        return list(reversed(self._prompts.values()))[::step], step
