"""What must a pod hold by now, because this router has just sent it there?

Fills the time between dispatch and the engine's own events, and is all there is for engines that publish none: for
those it models the engine's cache, least recently dispatched first out, up to its capacity. A match does not count as
use; only a dispatch does. Every method takes the time, which never runs backwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from router.index.masks import HolderMasks
from router.types import BlockHash, BlocksByTier, PodId


@dataclass(slots=True)
class _Dispatched:
    """One pod's blocks and when each was last dispatched, least recently first. (A plain dict would be searched from
    its beginning for every block that leaves.)"""

    slot: int
    ttl_s: float = 0.0
    at_s: OrderedDict[BlockHash, float] = field(default_factory=OrderedDict)


class PredictedIndex:
    """Dispatched blocks by pod, each until its time is up."""

    def __init__(self) -> None:
        self._masks = HolderMasks()
        self._pods: dict[PodId, _Dispatched] = {}

    def __len__(self) -> int:
        return sum(len(pod.at_s) for pod in self._pods.values())

    def record(
        self, pod: PodId, hashes: Sequence[BlockHash], now_s: float, *, ttl_s: float, capacity_blocks: int | None = None
    ) -> None:
        """`pod` was sent a prompt of these blocks. The deepest count as least recent: engines evict tails first.

        `ttl_s` holds for all of the pod's blocks until another is given."""
        dispatched = self._pods.get(pod)
        if dispatched is None:
            dispatched = self._pods[pod] = _Dispatched(self._masks.slot(pod))
        dispatched.ttl_s = ttl_s
        at_s = dispatched.at_s
        self._masks.add_all(dispatched.slot, [block for block in hashes if block not in at_s])
        for block in reversed(hashes):
            at_s[block] = now_s
            at_s.move_to_end(block)
        if capacity_blocks is not None:
            self._drop_oldest(dispatched, len(at_s) - capacity_blocks)

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, all counted in the GPU tier."""
        for dispatched in self._pods.values():
            times_s, expired_s = dispatched.at_s.values(), now_s - dispatched.ttl_s
            if next(iter(times_s), now_s) <= expired_s:
                self._drop_oldest(dispatched, sum(1 for _ in takewhile(expired_s.__ge__, times_s)))
        return self._masks.walk(hashes)

    def forget(self, pod: PodId) -> None:
        """The pod's cache is gone."""
        if self._pods.pop(pod, None) is not None:
            self._masks.forget(pod)

    def _drop_oldest(self, dispatched: _Dispatched, blocks: int) -> None:
        pop = dispatched.at_s.popitem
        self._masks.remove_all(dispatched.slot, [pop(last=False)[0] for _ in range(blocks)])
