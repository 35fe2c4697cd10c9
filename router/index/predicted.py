"""The blocks that a pod should hold because this router has sent prompts to it.

Covers the time between a dispatch and the engine's own events: an event that names the last block of a prompt ends its
prediction. For engines without events it models the cache: least recently dispatched blocks are evicted at the pod's
capacity. Only a dispatch counts as use, a match does not. Methods take the time, which must not go backwards.

A chain hash identifies everything before it. So blocks that were always dispatched together are stored as one run, by
the hash of the first: the cost of a request depends on the number of forks in its prompt rather than on its length. A
dispatch renews all blocks of its prompt, because a pod that has a block also has all blocks before it.

A dispatch begins as a `Prediction`: its blocks count as cached, because concurrent requests need to know where they are
being computed. It is confirmed once the pod has computed the prompt, and withdrawn if that did not happen. Only a
confirmed prediction renews blocks, has an expiry and, without events, fills the capacity; withdrawing one changes
nothing else.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import msgspec

from router.hashing import hash_array
from router.index.shared import common_blocks
from router.types import BlockChange, BlockHash, BlocksByTier, PodId

MAX_STALE_DISPATCHES = 1024
"""A pod's queue is cleaned when it is longer than twice the pod's runs plus this number."""
MAX_EXPIRED = 64
"""How many dispatches one match lets expire; later ones go on. After a burst and a silence many are due: 30,000 took 60
to 240 ms."""
UNTIL_EVENTS_S = 3.0
"""Events of a prompt arrive before its first token, through Redis within a second. If they do not name a checkpoint
until then, the pod has not kept it: it may have had the whole prompt, or have larger blocks."""
_CONFIRMED = sys.float_info.max
"""Until then at most, a confirmed prediction counts."""


class _Held(msgspec.Struct, gc=False):
    """What a pod has of a run."""

    number: int = 0
    """The latest confirmed prediction that contained the run; 0 if there is none, or its blocks are gone."""
    blocks: int = 0
    """How many leading blocks of the run the pod still has."""
    pending: int = 0
    """Predictions that contain the run and are neither confirmed nor withdrawn, or that the pod shall announce."""


class _PredictedRun(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks that follow those of `parent`, and by pod what it has of them."""

    blocks: Sequence[BlockHash]
    parent: _PredictedRun | None
    held: dict[PodId, _Held] = msgspec.field(default_factory=dict)


class Prediction(msgspec.Struct, gc=False, eq=False):
    """A prompt that was sent to a pod; whether the pod has computed it is not known yet."""

    number: int
    """Unique in its index."""
    pod: PodId
    hashes: Sequence[BlockHash]
    ends: Sequence[BlockHash]
    """On a pod with windows or states, the blocks after which hits can end once the prompt is computed."""
    ttl_s: float
    capacity_blocks: int | None
    """None: the pod announces its blocks."""
    _run: _PredictedRun | None
    """The last run of the prompt; None once it does not count."""
    _dispatched: _PodDispatches
    until_s: float = math.inf
    """When it ends if the pod does not announce it."""


class _Dispatch(msgspec.Struct, gc=False):
    """A confirmed prediction of a pod without events, identified by its last run. It owns its runs until a later
    dispatch renews them."""

    number: int
    at_s: float
    run: _PredictedRun | None


class _PodDispatches(msgspec.Struct, gc=False):
    """One pod's confirmed dispatches, oldest first, their number of runs and blocks, and its open predictions."""

    ttl_s: float = 0.0
    runs: int = 0
    blocks: int = 0
    queue: deque[_Dispatch] = msgspec.field(default_factory=deque)
    open: dict[BlockHash, list[Prediction]] = msgspec.field(default_factory=dict)
    """By last block of the prompt, those that are pending, or that the pod shall announce."""


class PredictedIndex:
    """Dispatched blocks by pod, each with an expiry time."""

    def __init__(self) -> None:
        self._pods: dict[PodId, _PodDispatches] = {}
        self._runs: dict[BlockHash, _PredictedRun] = {}
        """By first block."""
        self._predictions = 0
        self.checkpoints = Checkpoints()
        self._expiries: list[tuple[float, PodId]] = []
        """Heap of the next expiry of each pod that has blocks."""
        self._deadlines: list[tuple[float, PodId, BlockHash]] = []
        """Heap of when confirmed predictions end that the pod shall announce, with their last blocks."""

    def __len__(self) -> int:
        return sum(pod.blocks for pod in self._pods.values())

    def begin(
        self,
        pod: PodId,
        hashes: Sequence[BlockHash],
        *,
        ttl_s: float,
        capacity_blocks: int | None = None,
        ends: Sequence[BlockHash] = (),
    ) -> Prediction:
        """Count a prompt that is being sent to `pod` as cached there, until `confirm` or `withdraw`. O(runs), and
        O(blocks) for new blocks."""
        runs, run, start, end = self._runs, None, 0, len(hashes)
        while start < end:
            known = runs.get(hashes[start])
            if known is None:
                run = runs[hashes[start]] = _PredictedRun(hashes[start:], run)
                start = end
            else:
                length = common_blocks(known.blocks, hashes, start)
                run = known if length == len(known.blocks) else self._split(known, length)
                start += length
            held = run.held.get(pod)
            if held is None:
                run.held[pod] = _Held(pending=1)
            else:
                held.pending += 1
        dispatched = self._pods.get(pod)
        if dispatched is None:
            dispatched = self._pods[pod] = _PodDispatches()
        self._predictions += 1
        prediction = Prediction(self._predictions, pod, hashes, ends, ttl_s, capacity_blocks, run, dispatched)
        if end:
            dispatched.open.setdefault(hashes[-1], []).append(prediction)
            self.checkpoints.begin(pod, ends)
        return prediction

    def confirm(self, prediction: Prediction, now_s: float) -> Sequence[BlockHash]:
        """The pod has computed the prompt. Its last blocks count as least recent: engines evict from the end. The time
        to live applies to all blocks of the pod. No effect if it has ended or been confirmed. Returns the blocks that
        exceed the pod's capacity: it keeps as many as that. O(runs)."""
        dispatched, run = prediction._dispatched, prediction._run
        if run is None or prediction.until_s < math.inf:
            return ()
        pod, ttl_s, capacity_blocks = prediction.pod, prediction.ttl_s, prediction.capacity_blocks
        queue, number = dispatched.queue, prediction.number
        if (ttl_s != dispatched.ttl_s and queue) or (capacity_blocks is not None and not queue):
            heappush(self._expiries, ((queue[0].at_s if queue else now_s) + ttl_s, pod))
        dispatched.ttl_s = ttl_s
        if capacity_blocks is None:
            last = prediction.hashes[-1]
            until_s = now_s + (min(ttl_s, UNTIL_EVENTS_S) if prediction.ends else ttl_s)
            if not prediction.ends:  # it takes the place of earlier ones
                self._end_those(pod, (last,), until_s)
            prediction.until_s = until_s
            heappush(self._deadlines, (prediction.until_s, pod, last))
            return ()
        queue.append(_Dispatch(number, now_s, run))
        while run is not None:
            held, length = run.held[pod], len(run.blocks)
            if held.blocks != length:
                dispatched.runs += not held.number
                dispatched.blocks += length - held.blocks
                held.blocks = length
            held.number = number
            held.pending -= 1
            run = run.parent
        self._close(prediction)
        excess = dispatched.blocks - capacity_blocks
        evicted = self._drop_oldest(pod, dispatched, excess) if excess > 0 else ()
        if len(queue) > 2 * dispatched.runs + MAX_STALE_DISPATCHES:
            dispatched.queue = deque(
                one for one in queue if one.run and (own := one.run.held.get(pod)) and own.number == one.number
            )
        return evicted

    def withdraw(self, prediction: Prediction) -> None:
        """The pod has not computed the prompt. No effect after `confirm`, or if it has ended."""
        if prediction.until_s == math.inf:
            self._end(prediction)

    def apply(self, pod: PodId, change: BlockChange) -> None:
        """The pod has announced this change: from now on its events alone count. A prompt that it has not computed yet
        will be there again."""
        if not change.layer:
            self._end_those(pod, change.blocks, math.inf if change.held else _CONFIRMED)
        elif change.held:
            self.checkpoints.announced(pod, change.blocks)

    def match(self, hashes: Sequence[BlockHash], now_s: float = -math.inf) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, all counted in the GPU tier. Without a time, nothing expires. O(runs x pods that have
        them)."""
        if (self._expiries and self._expiries[0][0] <= now_s) or (self._deadlines and self._deadlines[0][0] <= now_s):
            self._expire(now_s)
        found: dict[PodId, BlocksByTier] = {}
        runs, start, end = self._runs, 0, len(hashes)
        while start < end and (run := runs.get(hashes[start])) is not None:
            common = common_blocks(run.blocks, hashes, start)
            for pod, held in run.held.items():
                blocks = common if held.pending or held.blocks > common else held.blocks
                if blocks:
                    found[pod] = (start + blocks, 0, 0, 0)
            start += common
            if common < len(run.blocks):
                break
        return found

    def computing(self, pod: PodId, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks of prompts that `pod` has not computed yet. O(runs)."""
        start = 0
        while start < len(hashes) and (run := self._runs.get(hashes[start])) and (held := run.held.get(pod)):
            common = common_blocks(run.blocks, hashes, start) if held.pending else 0
            start += common
            if common < len(run.blocks):
                break
        return start

    def forget(self, pod: PodId) -> None:
        dispatched = self._pods.get(pod)
        if dispatched is not None:
            self._end_those(pod, dispatched.open, math.inf)
            self._drop_oldest(pod, dispatched, dispatched.blocks)
            while dispatched.queue:
                self._drop_tail(pod, dispatched, 0)
            del self._pods[pod]

    def _split(self, run: _PredictedRun, at: int) -> _PredictedRun:
        """Split the run and return its front part, a new run. `run` becomes the rest, because dispatches and later runs
        refer to it. It keeps every pod, even with 0 blocks, so that eviction still reaches the front part."""
        front = _PredictedRun(run.blocks[:at], run.parent)
        for pod, held in run.held.items():
            front.held[pod] = _Held(held.number, min(held.blocks, at), held.pending)
            held.blocks = max(held.blocks - at, 0)
            if held.number:
                self._pods[pod].runs += 1
        run.blocks, run.parent = run.blocks[at:], front
        self._runs[front.blocks[0]], self._runs[run.blocks[0]] = front, run
        return front

    def _end_those(self, pod: PodId, blocks: Iterable[BlockHash], until_s: float) -> None:
        """End the predictions of prompts that end with one of `blocks`, of those that count until then at most."""
        dispatched = self._pods.get(pod)
        if dispatched is not None and dispatched.open:
            for last in dispatched.open.keys() & blocks:
                for prediction in [one for one in dispatched.open[last] if one.until_s <= until_s]:
                    self._end(prediction)

    def _end(self, prediction: Prediction) -> None:
        """Its blocks do not count any more. Idempotent."""
        pod, run = prediction.pod, prediction._run
        if run is not None:
            self._close(prediction)
        while run is not None:
            held = run.held[pod]
            held.pending -= 1
            self._remove_if_unused(run, pod, held)
            run = run.parent

    def _close(self, prediction: Prediction) -> None:
        alike, last = prediction._dispatched.open, prediction.hashes[-1]
        alike[last].remove(prediction)
        if not alike[last]:
            del alike[last]
        prediction._run = None
        self.checkpoints.withdraw(prediction.pod, prediction.ends)

    # --- eviction ---

    def _expire(self, now_s: float) -> None:
        """End what is due, up to `MAX_EXPIRED` dispatches."""
        for _ in range(MAX_EXPIRED):
            if not self._deadlines or self._deadlines[0][0] > now_s:
                break
            _, pod, last = heappop(self._deadlines)
            self._end_those(pod, (last,), now_s)
        for _ in range(MAX_EXPIRED):
            if not self._expiries or self._expiries[0][0] > now_s:
                break
            self._expire_oldest(heappop(self._expiries)[1], now_s)

    def _expire_oldest(self, pod: PodId, now_s: float) -> None:
        """Drop the blocks of the oldest dispatch if they have expired, and schedule the pod's next expiry."""
        dispatched = self._pods.get(pod)
        if dispatched is None or not dispatched.queue:
            return
        oldest, ttl_s = dispatched.queue[0], dispatched.ttl_s
        while dispatched.queue and dispatched.queue[0] is oldest and oldest.at_s + ttl_s <= now_s:
            self._drop_tail(pod, dispatched, dispatched.blocks)
        if dispatched.queue:
            heappush(self._expiries, (dispatched.queue[0].at_s + ttl_s, pod))

    def _drop_oldest(self, pod: PodId, dispatched: _PodDispatches, blocks: int) -> array[int]:
        """The dropped blocks."""
        found = hash_array()
        while blocks > 0:
            dropped = self._drop_tail(pod, dispatched, blocks)
            blocks -= len(dropped)
            found.extend(dropped)
        return found

    def _drop_tail(self, pod: PodId, dispatched: _PodDispatches, max_blocks: int) -> Sequence[BlockHash]:
        """Drop up to `max_blocks` from the end of the oldest dispatch's last run. An empty run is removed from the
        dispatch, a dispatch without runs from the queue. Returns the dropped blocks."""
        oldest = dispatched.queue[0]
        run = oldest.run
        if run is None or (held := run.held.get(pod)) is None or held.number != oldest.number:
            dispatched.queue.popleft()
            return ()
        dropped = min(held.blocks, max_blocks)
        dispatched.blocks -= dropped
        held.blocks -= dropped
        blocks = run.blocks[held.blocks : held.blocks + dropped]
        if not held.blocks:
            held.number = 0
            dispatched.runs -= 1
            self._remove_if_unused(run, pod, held)
            oldest.run = run.parent
        return blocks

    def _remove_if_unused(self, run: _PredictedRun, pod: PodId, held: _Held) -> None:
        if not held.number and not held.pending:
            del run.held[pod]
            if not run.held:
                del self._runs[run.blocks[0]]


# --- checkpoints of windows and states ---


class Checkpoints:
    """The checkpoints that pods have not announced: where hits will be able to end on a pod that is computing a prompt,
    if its windows and states keep some blocks only. One is identified by the block in front of it, whose chain hash
    identifies the whole prefix. Every `begin` is followed by one `withdraw`."""

    def __init__(self) -> None:
        self._pods: dict[BlockHash, set[PodId]] = {}
        """By block, the pods that will have a checkpoint behind it."""
        self._prompts = Counter[tuple[PodId, BlockHash]]()
        """The number of prompts that keep it, announced or not."""

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._prompts[pod, block] += 1
            self._pods.setdefault(block, set()).add(pod)

    def announced(self, pod: PodId, blocks: Iterable[BlockHash]) -> None:
        """The pod has kept these blocks. From now on its events alone count: it may evict them at any time."""
        for block in blocks:
            if others := self._pods.pop(block, set()) - {pod}:
                self._pods[block] = others

    def withdraw(self, pod: PodId, ends: Sequence[BlockHash]) -> None:
        for block in ends:
            self._prompts[pod, block] -= 1
            if not self._prompts[pod, block]:
                del self._prompts[pod, block]
                self.announced(pod, [block])

    def match(self, hashes: Sequence[BlockHash]) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod, up to the last checkpoint in the prompt. O(blocks) while there are any."""
        found: dict[PodId, BlocksByTier] = {}
        if not self._pods:
            return found
        for depth, pods in enumerate(map(self._pods.get, hashes), start=1):
            if pods:
                found.update(dict.fromkeys(pods, (depth, 0, 0, 0)))
        return found
