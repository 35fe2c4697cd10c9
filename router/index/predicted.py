"""What must a pod hold by now, because this router has just sent it there?

Fills the time between dispatch and the engine's own events, and is all there is for engines that publish none: for
those it models the engine's cache, least recently dispatched first out, up to its capacity. A match does not count as
use; only a dispatch does. Every method takes the time, which never runs backwards.

A chain hash stands for all that is before it, so blocks that were only ever sent together are kept together, as a run
under the hash of its first: what a request costs here depends on how often its prompt forks from others, and hardly on
how long it is. A dispatch renews every block of its prompt: whoever has a block has those before it, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from router.index.runs import common_blocks
from router.types import BlockHash, BlocksByTier, PodId

SPARE_DISPATCHES = 1024
"""How many more dispatches than twice a pod's runs may stand in its queue before it is cleaned."""
_NEVER = (0, 0)


class _Run(msgspec.Struct, gc=False, eq=False):
    """Blocks that follow on one another, behind those of `parent`. `held`: by pod the number of the last dispatch that
    had them, and how many of them, from the first on, the pod still has."""

    blocks: Sequence[BlockHash]
    parent: _Run | None
    held: dict[PodId, tuple[int, int]] = msgspec.field(default_factory=dict)


class _Dispatch(msgspec.Struct, gc=False):
    """One prompt on its way to a pod, by its last run. It counts for the runs that no later one has renewed."""

    number: int
    at_s: float
    run: _Run | None


class _Dispatched(msgspec.Struct, gc=False):
    """One pod's dispatches, oldest first, and how many runs and blocks it has by them."""

    ttl_s: float = 0.0
    runs: int = 0
    blocks: int = 0
    queue: deque[_Dispatch] = msgspec.field(default_factory=deque)


class PredictedIndex:
    """Dispatched blocks by pod, each until its time is up."""

    def __init__(self) -> None:
        self._pods: dict[PodId, _Dispatched] = {}
        self._runs: dict[BlockHash, _Run] = {}
        """By their first blocks."""
        self._dispatches = 0
        self._expiries: list[tuple[float, PodId]] = []
        """A heap: when to look for blocks whose time is up. One entry a pod that has any."""

    def __len__(self) -> int:
        return sum(pod.blocks for pod in self._pods.values())

    def record(
        self, pod: PodId, hashes: Sequence[BlockHash], now_s: float, *, ttl_s: float, capacity_blocks: int | None = None
    ) -> None:
        """`pod` was sent a prompt of these blocks. The deepest count as least recent: engines evict tails first.

        `ttl_s` holds for all of the pod's blocks until another is given. O(runs), and O(blocks) for new ones."""
        dispatched = self._pods.get(pod)
        if dispatched is None:
            dispatched = self._pods[pod] = _Dispatched()
        queue = dispatched.queue
        if ttl_s != dispatched.ttl_s or not queue:
            dispatched.ttl_s = ttl_s
            heappush(self._expiries, ((queue[0].at_s if queue else now_s) + ttl_s, pod))
        self._dispatches += 1
        queue.append(_Dispatch(self._dispatches, now_s, self._renew(pod, dispatched, hashes)))
        if capacity_blocks is not None:
            self._drop_oldest(pod, dispatched, dispatched.blocks - capacity_blocks)
        if len(queue) > 2 * dispatched.runs + SPARE_DISPATCHES:
            dispatched.queue = deque(one for one in queue if one.run and one.run.held.get(pod, _NEVER)[0] == one.number)

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, all counted in the GPU tier. O(runs, and the pods that have them)."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, pod = heappop(self._expiries)
            if pod in self._pods:
                self._expire(pod, now_s)
        found: dict[PodId, BlocksByTier] = {}
        runs, start, end = self._runs, 0, len(hashes)
        while start < end and (run := runs.get(hashes[start])) is not None:
            common = common_blocks(run.blocks, hashes, start)
            for pod, (_, blocks) in run.held.items():
                if blocks:
                    found[pod] = (start + (blocks if blocks < common else common), 0, 0, 0)
            start += common
            if common < len(run.blocks):
                break
        return found

    def forget(self, pod: PodId) -> None:
        """The pod's cache is gone."""
        dispatched = self._pods.get(pod)
        if dispatched is not None:
            self._drop_oldest(pod, dispatched, dispatched.blocks)
            while dispatched.queue:
                self._drop_tail(pod, dispatched, 0)
            del self._pods[pod]

    # --- runs ---

    def _renew(self, pod: PodId, dispatched: _Dispatched, hashes: Sequence[BlockHash]) -> _Run | None:
        """The pod has all of these by the present dispatch. Returns the last run of them.

        A run is cut where the prompt leaves it; what follows the last one is a new one."""
        runs, run, start, end, number = self._runs, None, 0, len(hashes), self._dispatches
        while start < end:
            first = hashes[start]
            known = runs.get(first)
            if known is None:
                run, length = _Run(hashes[start:], run), end - start
                runs[first] = run
            else:
                length = common_blocks(known.blocks, hashes, start)
                run = known if length == len(known.blocks) else self._cut(known, length)
            had = run.held.get(pod)
            if had is None:
                dispatched.runs += 1
                dispatched.blocks += length
            else:
                dispatched.blocks += length - had[1]
            run.held[pod] = number, length
            start += length
        return run

    def _cut(self, run: _Run, at: int) -> _Run:
        """Make two of it; returns the front. The rest keeps its identity, by which dispatches and runs behind it know
        it, and stays with every holder, if only as a way to the front."""
        front = _Run(run.blocks[:at], run.parent)
        for pod, (number, blocks) in run.held.items():
            front.held[pod] = number, min(blocks, at)
            run.held[pod] = number, max(blocks - at, 0)
            self._pods[pod].runs += 1
        run.blocks, run.parent = run.blocks[at:], front
        self._runs[front.blocks[0]], self._runs[run.blocks[0]] = front, run
        return front

    # --- what leaves ---

    def _expire(self, pod: PodId, now_s: float) -> None:
        """Drop what is too old, and look again when the oldest of the rest will be."""
        dispatched = self._pods[pod]
        ttl_s = dispatched.ttl_s
        while dispatched.queue and dispatched.queue[0].at_s + ttl_s <= now_s:
            self._drop_tail(pod, dispatched, dispatched.blocks)
        if dispatched.queue:
            heappush(self._expiries, (dispatched.queue[0].at_s + ttl_s, pod))

    def _drop_oldest(self, pod: PodId, dispatched: _Dispatched, blocks: int) -> None:
        while blocks > 0:
            blocks -= self._drop_tail(pod, dispatched, blocks)

    def _drop_tail(self, pod: PodId, dispatched: _Dispatched, most: int) -> int:
        """Drop up to so many blocks from the end of the oldest dispatch's last run; without any left, the run leaves
        it, and without a run, it leaves the queue. Returns how many blocks were dropped."""
        oldest = dispatched.queue[0]
        run = oldest.run
        number, blocks = run.held.get(pod, _NEVER) if run else _NEVER
        if run is None or number != oldest.number:
            dispatched.queue.popleft()
            return 0
        dropped = min(blocks, most)
        dispatched.blocks -= dropped
        if dropped < blocks:
            run.held[pod] = number, blocks - dropped
            return dropped
        del run.held[pod]
        dispatched.runs -= 1
        if not run.held:
            del self._runs[run.blocks[0]]
        oldest.run = run.parent
        return dropped
