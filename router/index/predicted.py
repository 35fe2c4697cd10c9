"""What must a pod hold by now, because this router has just sent it there?

Fills the time between dispatch and the engine's own events, and is all there is for engines that publish none: for
those it models the engine's cache, least recently dispatched first out, up to its capacity. A match does not count as
use; only a dispatch does. Every method takes the time, which never runs backwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile

from router.types import BlockHash, BlocksByTier, PodId


@dataclass(slots=True)
class _Dispatched:
    """One pod's blocks and when each was last dispatched, least recently first. (A plain dict would be searched from
    its beginning for every block that leaves.) `lane`: the pod's bit."""

    lane: int
    ttl_s: float = 0.0
    at_s: OrderedDict[BlockHash, float] = field(default_factory=OrderedDict)


class PredictedIndex:
    """Dispatched blocks by pod, each until its time is up.

    Few blocks that change with every request: a dict of bits is faster here than the table of what is announced."""

    def __init__(self) -> None:
        self._pods: dict[PodId, _Dispatched] = {}
        self._lanes: dict[BlockHash, int] = {}
        """Block to the lanes of the pods that it was sent to."""
        self._names: dict[int, PodId] = {}
        self._expiries: list[tuple[float, PodId]] = []
        """A heap: when to look for blocks whose time is up. One entry a pod that has any."""

    def __len__(self) -> int:
        return sum(len(pod.at_s) for pod in self._pods.values())

    def record(
        self, pod: PodId, hashes: Sequence[BlockHash], now_s: float, *, ttl_s: float, capacity_blocks: int | None = None
    ) -> None:
        """`pod` was sent a prompt of these blocks. The deepest count as least recent: engines evict tails first.

        `ttl_s` holds for all of the pod's blocks until another is given."""
        dispatched = self._pods.get(pod)
        if dispatched is None:
            dispatched = self._pods[pod] = _Dispatched(self._free_lane())
            self._names[dispatched.lane] = pod
        at_s = dispatched.at_s
        if ttl_s != dispatched.ttl_s or not at_s:
            dispatched.ttl_s = ttl_s
            heappush(self._expiries, (next(iter(at_s.values()), now_s) + ttl_s, pod))
        lanes, lane = self._lanes, dispatched.lane
        for block in reversed(hashes):
            if block not in at_s:
                lanes[block] = lanes.get(block, 0) | lane
            at_s[block] = now_s
            at_s.move_to_end(block)
        if capacity_blocks is not None:
            self._drop_oldest(dispatched, len(at_s) - capacity_blocks)

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, all counted in the GPU tier."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, pod = heappop(self._expiries)
            if pod in self._pods:
                self._expire(pod, now_s)
        return self._runs(hashes)

    def forget(self, pod: PodId) -> None:
        """The pod's cache is gone."""
        dispatched = self._pods.pop(pod, None)
        if dispatched is not None:
            self._drop_oldest(dispatched, len(dispatched.at_s))
            del self._names[dispatched.lane]

    def _free_lane(self) -> int:
        lane = 1
        while lane in self._names:
            lane <<= 1
        return lane

    def _expire(self, pod: PodId, now_s: float) -> None:
        """Drop what is too old, and look again when the oldest of the rest will be."""
        dispatched = self._pods[pod]
        ttl_s, times_s = dispatched.ttl_s, dispatched.at_s.values()
        self._drop_oldest(dispatched, sum(1 for _ in takewhile(lambda at_s: at_s + ttl_s <= now_s, times_s)))
        if times_s:
            heappush(self._expiries, (next(iter(times_s)) + ttl_s, pod))

    def _drop_oldest(self, dispatched: _Dispatched, blocks: int) -> None:
        pop, lanes = dispatched.at_s.popitem, self._lanes
        for _ in range(blocks):
            block, _at_s = pop(last=False)
            if rest := lanes[block] & ~dispatched.lane:
                lanes[block] = rest
            else:
                del lanes[block]

    def _runs(self, hashes: Sequence[BlockHash]) -> dict[PodId, BlocksByTier]:
        found: dict[PodId, BlocksByTier] = {}
        get, alive = self._lanes.get, -1
        for depth, block in enumerate(hashes):
            lanes = get(block, 0)
            if lanes & alive != alive:
                self._end(alive & ~lanes if depth else 0, depth, found)
                alive &= lanes
                if not alive:
                    return found
        self._end(alive if hashes else 0, len(hashes), found)
        return found

    def _end(self, lanes: int, depth: int, found: dict[PodId, BlocksByTier]) -> None:
        """The runs of these lanes end before the block at `depth`."""
        while lanes:
            lane = lanes & -lanes
            lanes ^= lane
            found[self._names[lane]] = (depth, 0, 0, 0)
