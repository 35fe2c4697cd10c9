"""How often would evicted blocks have been requested again?

Hashes of recently evicted blocks are kept in order of eviction: a ghost list. A prompt block that no pod holds but the
list contains would have been cached if all pods were larger by the length of the list. That gives the derivative of the
hit share by the logarithm of capacity, h', and the value of an evicted token: h' / (1 - h) tokens computed again.

    reuse = (found * held / ghosts + PRIOR_REUSE * w) / (missed + w)        w = PRIOR_SHARE * held

`held` and `ghosts` are the blocks that pods hold and those of the list; `missed` the prompt blocks that no pod held,
`found` those of them that the list contained, both of one request in `SAMPLE` and decayed by turnover of the caches.
A router counts its own requests only: a ratio needs no exchange with other routers.

Large caches are sampled by hash: a list longer than `MAX_GHOSTS` keeps, and a prompt counts, only hashes with more zero
bits at the end. Every block is in the sample or not, whenever it is evicted or requested, so the ratio stays unbiased.
With the list full, at least 2,000 missed blocks count: if a tenth of them is found, the standard error is 7 % of the
value, more where the blocks of a prompt are found together. Source: ghost lists as in ARC (Megiddo and Modha 2003);
sampling of hashes with a fixed size as in SHARDS (Waldspurger et al. 2015).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from router.hashing import hash_array
from router.types import BlockChange, BlockHash, BlocksByTier, PodId, Tier

GHOST_SHARE = 0.25
"""Length of the list, as a share of the blocks that pods hold."""
MAX_GHOSTS = 1 << 11
"""Maximum kept hashes of a model. Most evicted blocks of large caches then cost one test of bits."""
SAMPLE = 4
MAX_WAITING_BLOCKS, MAX_WAITING_S = 4096, 1.0
"""Evicted blocks are listed together, before a prompt is counted; earlier if there are this many, or no request came
for this time."""
MAX_COUNTED_BLOCKS = 4096
"""Missed blocks of a prompt that are counted."""
WINDOW = 2.0
"""Counts decay by e when this multiple of the held blocks has been missed."""
PRIOR_REUSE = 0.25
PRIOR_SHARE = 0.25
MAX_REUSE = 16.0
SOON_S = 60.0
BEFORE_S = -1.0
"""A time before the first request; not 0, which means none."""


class EvictedBlocks:
    def __init__(self) -> None:
        self._ghosts: dict[BlockHash, float] = {}
        """Time of the last request before the block was listed; oldest eviction first."""
        self._waiting = hash_array()
        """Evicted blocks that are not listed yet."""
        self._now_s = BEFORE_S
        """Time of the latest request."""
        self.soon_tokens = 0.0
        """Estimated prompt tokens that were computed again within `SOON_S` of their eviction, since the start."""
        self._mask = 0
        """Hashes with one of these bits are not sampled."""
        self.reuse = PRIOR_REUSE
        """Expected number of requests that would have used an evicted block, between 0 and `MAX_REUSE`."""
        self._held: dict[PodId, int] = {}
        self._all_held = 0
        self._deepest: dict[PodId, Tier] = {}
        """The farthest tier of each pod: a block leaves the pod with its removal from there."""
        self._found = 0.0
        self._missed = 0.0
        self._seen = 0

    def listed(self) -> int:
        """Length of the list, with all blocks that were evicted."""
        self._list_waiting()
        return len(self._ghosts)

    def evicted(self, pod: PodId, change: BlockChange, held: int) -> None:
        """`pod` evicted blocks from a tier, and now holds `held` blocks."""
        tier, blocks = change.tier, change.blocks
        if tier < self._deepest.get(pod, tier):
            return
        self._deepest[pod] = tier
        if held != self._held.get(pod):
            self.holds(pod, held)
        self._waiting.extend(blocks)
        if len(self._waiting) >= MAX_WAITING_BLOCKS:
            self._list_waiting()

    def fills_gpu(self, pod: PodId) -> bool:
        """Whether `pod` has evicted blocks, and has no other tier than its GPU."""
        return self._deepest.get(pod) is Tier.GPU

    def holds(self, pod: PodId, held: int) -> None:
        """`pod` holds `held` blocks; 0 when it is gone."""
        self._all_held += held - self._held.get(pod, 0)
        if held:
            self._held[pod] = held
        else:
            self._held.pop(pod, None)
            self._deepest.pop(pod, None)

    def requested(
        self,
        hashes: Sequence[BlockHash],
        held: Mapping[PodId, BlocksByTier],
        now_s: float = BEFORE_S,
        block_tokens: int = 1,
    ) -> None:
        """A prompt, and its leading blocks by pod, now. O(pods + blocks) for one call in `SAMPLE`."""
        if now_s > self._now_s + MAX_WAITING_S:
            self._list_waiting()
        self._now_s = now_s
        self._seen += 1
        if self._seen % SAMPLE or not self.listed():
            return
        held_blocks = max(map(sum, held.values()), default=0)
        missed = self._sampled(hash_array(hashes[held_blocks : held_blocks + MAX_COUNTED_BLOCKS]))
        held_sample = self._all_held / (self._mask + 1)
        kept = 1 - min(len(missed) * SAMPLE / (WINDOW * max(held_sample, 1.0)), 0.5)
        evicted_s = [*filter(None, map(self._ghosts.get, missed))]
        if evicted_s:
            soon = sum(map((now_s - SOON_S).__le__, evicted_s))
            self.soon_tokens += soon * SAMPLE * (self._mask + 1) * block_tokens
        self._found = self._found * kept + len(evicted_s)
        self._missed = self._missed * kept + len(missed)
        if self._missed:
            prior = PRIOR_SHARE * held_sample / SAMPLE
            found = self._found * held_sample / len(self._ghosts)
            self.reuse = min((found + PRIOR_REUSE * prior) / (self._missed + prior), MAX_REUSE)

    def _list_waiting(self) -> None:
        """Put the waiting blocks on the list."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, hash_array()
        sampled, ghosts = self._sampled(waiting), self._ghosts
        for block in sampled:
            ghosts.pop(block, None)
        ghosts |= dict.fromkeys(sampled, self._now_s)
        self._shorten()

    def _sampled(self, blocks: array[int]) -> list[BlockHash]:
        """Those of `blocks` that are in the sample."""
        hashes = np.asarray(blocks)
        sampled: list[BlockHash] = hashes[hashes & np.uint64(self._mask) == 0].tolist()
        return sampled

    def _shorten(self) -> None:
        """Drop the oldest; keep fewer hashes if the list would be too long."""
        limit = max(int(self._all_held * GHOST_SHARE) // (self._mask + 1), 1)
        ghosts = self._ghosts
        if limit > MAX_GHOSTS and len(ghosts) > MAX_GHOSTS:
            self._mask = self._mask * 2 + 1
            self._ghosts = {block: ghosts[block] for block in self._sampled(hash_array(ghosts))}
            self._found /= 2
            self._missed /= 2
            return
        for block in [*islice(ghosts, max(len(ghosts) - limit, 0))]:
            del ghosts[block]
