"""Watches each pod: runs the checks of a table when they are due, and has no task while none runs.

A lane is a part of the table whose checks run one after another, in its order; different lanes of a pod run at the same
time, so that a self-test that hangs delays no probe. When a pod's state or epoch changes, each check of it is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias, TypeGuard

from router.errors import UpstreamBroken, UpstreamError
from router.feeds.supervise import cancel_all, jittered, loop_time_s, raise_if_cancelled, supervise
from router.fleet.fleet import Fleet
from router.fleet.retry_pause import retry_pause_s
from router.stores.logged_once import LoggedOnce
from router.types import Pod, PodId, PodState, PodStatus

Fetch: TypeAlias = Callable[[Pod, str, float], Awaitable[bytes]]
"""GET a path of a pod within a timeout in seconds; returns the body of a 200 response. Raises `UpstreamError`."""
Post: TypeAlias = Callable[[Pod, str, Mapping[str, Any], float], Awaitable[bytes]]
"""The same for a POST of JSON."""

_UNSURE = frozenset({408, 429, 500, 502, 503, 504})


def is_refusal(error: UpstreamError) -> TypeGuard[UpstreamBroken]:
    """Whether a pod has refused a request of the router. Any other error says nothing of what the pod serves."""
    return isinstance(error, UpstreamBroken) and bool(error.status) and error.status not in _UNSURE


MIN_REPEAT_S = 0.1
"""A check whose own result changes its pod runs again after this at the earliest: a pod that says yes and no in turn is
not asked as fast as it answers."""
TICK_S = 0.002
"""The resolution of timers: one that ends earlier would find nothing due, again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table.

    `run` returns False if the check failed, and None if it has no result. A check that is `once` runs in each epoch of
    the pod until it returns True. `max_s`: the pause doubles with each failure in a row, up to this; 0: it does not.
    """

    name: str
    run: Callable[[Pod, Turn], Awaitable[bool | None]]
    due: Callable[[PodStatus], bool]
    """Whether the pod needs it now. Raises nothing."""
    every_s: Callable[[PodStatus], float]
    """Time until it runs again, and until it is looked at again if it is not due."""
    max_s: float = 0.0
    once: bool = False
    forget: Callable[[PodId], object] = lambda _pod: None
    """Called with a pod that is gone."""


def check_of_missing(
    name: str,
    run: Callable[[Pod, Turn], Awaitable[bool | None]],
    missing: Callable[[Pod], object],
    every_s: float,
    **more: Any,
) -> Check:
    """A check of READY pods that runs while something of them is missing."""

    def is_due(status: PodStatus) -> bool:
        return status.state is PodState.READY and bool(missing(status.pod))

    return Check(name=name, run=run, due=is_due, every_s=lambda _status: every_s, **more)


@dataclass(slots=True, eq=False)
class Turn:
    """What is known of one check of one pod: when it may run next and, in this epoch, its failures in a row, whether it
    has passed, and its warnings."""

    check: Check
    next_s: float = 0.0
    epoch: int = 0
    failures: int = 0
    is_done: bool = False
    logged: LoggedOnce = field(default_factory=LoggedOnce)

    def changed(self, epoch: int) -> None:
        self.next_s = -inf
        if self.epoch != epoch:
            self.epoch, self.failures, self.is_done = epoch, 0, False
            self.logged.clear()

    async def run(self, status: PodStatus) -> None:
        """Run the check, and count its result if the pod is still in the same epoch."""
        self.next_s = 0.0
        result = await self.check.run(status.pod, self)
        if self.epoch == status.pod.epoch and result is not None:
            self.failures, self.is_done = 0 if result else self.failures + 1, self.check.once and result
        pause_s = jittered(self.pause_s(status))
        has_changed = self.next_s != 0.0
        self.next_s = loop_time_s() + (min(pause_s, MIN_REPEAT_S) if has_changed else pause_s)

    def pause_s(self, status: PodStatus) -> float:
        every_s = self.check.every_s(status)
        return retry_pause_s(self.failures + 1, every_s, self.check.max_s) if self.check.max_s else every_s


class _Lane:
    """The checks of one pod that run one after another: a timer while none is due, a task while one runs."""

    def __init__(self, fleet: Fleet, pod_id: PodId, checks: Sequence[Check]) -> None:
        self._fleet = fleet
        self._pod_id = pod_id
        self.turns = tuple(map(Turn, checks))
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def changed(self, epoch: int) -> None:
        for turn in self.turns:
            turn.changed(epoch)
        if self.task is None:
            self._look()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()

    def _look(self) -> None:
        """Run what is due, or wait until something may be."""
        if self._timer is not None:
            self._timer.cancel()
        status, now_s = self._fleet.status(self._pod_id), loop_time_s()
        if status is None:
            return
        if self._due(status, now_s) is not None:
            name = f"{self.turns[0].check.name} of {self._pod_id}"
            self.task = asyncio.create_task(supervise(name, self._run), name=name)
            return
        waits = [max(t.next_s - now_s, 0) or t.check.every_s(status) for t in self.turns if not t.is_done]
        if waits:
            self._timer = asyncio.get_running_loop().call_later(min(waits) + TICK_S, self._look)

    def _due(self, status: PodStatus, now_s: float) -> Turn | None:
        waiting = (turn for turn in self.turns if turn.next_s <= now_s and not turn.is_done)
        return next((turn for turn in waiting if turn.check.due(status)), None)

    async def _run(self) -> None:
        while (status := self._fleet.status(self._pod_id)) and (turn := self._due(status, loop_time_s())):
            await turn.run(status)
            raise_if_cancelled()
        self.task = None
        self._look()


@dataclass(slots=True, eq=False)
class Watch:
    """The lanes of all pods, as pods come and go."""

    fleet: Fleet
    table: Sequence[Sequence[Check]]
    _lanes: dict[PodId, list[_Lane]] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch all pods until cancelled."""
        unlisten = self.fleet.listen(self._on_change)
        try:
            for status in self.fleet.snapshot.pods:
                self._on_change(status.pod, PodState.GONE, status.state)
            await asyncio.Event().wait()
        finally:
            unlisten()
            tasks = [lane.task for lanes in self._lanes.values() for lane in lanes]
            for pod_id in [*self._lanes]:
                self._end(pod_id)
            await cancel_all(task for task in tasks if task is not None)

    def _on_change(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._end(pod.id)
            return
        if pod.id not in self._lanes:
            self._lanes[pod.id] = [_Lane(self.fleet, pod.id, checks) for checks in self.table if checks]
        for lane in self._lanes[pod.id]:
            lane.changed(pod.epoch)

    def _end(self, pod_id: PodId) -> None:
        for lane in self._lanes.pop(pod_id, ()):
            lane.end()
            for turn in lane.turns:
                turn.check.forget(pod_id)
