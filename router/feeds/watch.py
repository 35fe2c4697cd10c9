"""Watches each pod: runs the checks of a table when they are due, and has no task while none runs.

A lane is a part of the table whose checks run one after another, in its order; different lanes of a pod run at the same
time, so that a self-test that hangs delays no probe. When a pod's state or epoch changes, each check of it is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

from router.feeds.supervise import Restarts, cancel_all, jittered, loop_time_s, raise_if_cancelled
from router.fleet.fleet import Fleet
from router.fleet.retry_pause import retry_pause_s
from router.stores.logged_once import LoggedOnce
from router.types import Pod, PodId, PodState, PodStatus

Fetch: TypeAlias = Callable[[Pod, str, float], Awaitable[bytes]]
"""GET a path of a pod within a timeout in seconds; returns the body of a 200 response. Raises `UpstreamError`."""
Post: TypeAlias = Callable[[Pod, str, Mapping[str, Any], float], Awaitable[bytes]]
"""The same for a POST of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table.

    `run` returns False if the check failed, and None if it has no result. A check that is `once` runs in each epoch of
    the pod until it returns True. `max_s`: the pause doubles with each failure in a row, up to this; 0: it does not.
    """

    name: str
    run: Callable[[Pod, Turn], Awaitable[bool | None]]
    due: Callable[[PodStatus], bool]
    """Whether the pod needs it now."""
    every_s: Callable[[PodStatus], float]
    """Time until it runs again, and until it is looked at again if it is not due."""
    max_s: float = 0.0
    once: bool = False
    forget: Callable[[PodId], None] = lambda _pod: None
    """Called with a pod that is gone."""


Lanes: TypeAlias = Sequence[Sequence[Check]]


@dataclass(slots=True, eq=False)
class Turn:
    """What is known of one check of one pod."""

    check: Check
    next_s: float = 0.0
    epoch: int = 0
    failures: int = 0
    """In a row, in this epoch."""
    is_done: bool = False
    logged: LoggedOnce = field(default_factory=LoggedOnce)
    """Warnings of this epoch."""
    restarts: Restarts = field(default_factory=Restarts)

    def changed(self, epoch: int) -> None:
        self.next_s = 0.0
        if self.epoch != epoch:
            self.epoch, self.failures, self.is_done = epoch, 0, False
            self.logged.clear()

    def is_due(self, status: PodStatus, now_s: float) -> bool:
        if self.is_done or now_s < self.next_s:
            return False
        try:
            return self.check.due(status)
        except Exception as error:
            self.broke(status.pod.id, error)
            return False

    async def run(self, status: PodStatus) -> None:
        """Run the check, and count its result if the pod is still in the same epoch."""
        check = self.check
        self.next_s = inf
        try:
            result = await check.run(status.pod, self)
        except Exception as error:
            self.broke(status.pod.id, error)
            return
        if self.epoch == status.pod.epoch and result is not None:
            self.failures, self.is_done = 0 if result else self.failures + 1, check.once and result
        if self.next_s == inf:  # else the pod has changed meanwhile
            self.next_s = loop_time_s() + jittered(self._pause_s(status))

    def _pause_s(self, status: PodStatus) -> float:
        every_s = self.check.every_s(status)
        return retry_pause_s(self.failures + 1, every_s, self.check.max_s) if self.check.max_s else every_s

    def broke(self, pod_id: PodId, error: Exception) -> None:
        now_s = loop_time_s()
        self.next_s = now_s + self.restarts.after(f"{self.check.name} of {pod_id}", error, now_s)


class _Lane:
    """The checks of one pod that run one after another: a timer while none is due, a task while one runs."""

    __slots__ = ("_fleet", "_pod_id", "_timer", "task", "turns")

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
        """Start the checks that are due, or wait until one may be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (status := self._fleet.status(self._pod_id)) is None:
            return
        now_s = loop_time_s()
        if (turn := self._next(status, now_s)) is not None:
            self.task = asyncio.create_task(self._run(turn, status), name=f"{turn.check.name} of {self._pod_id}")
        elif (wait_s := self._wait_s(status, now_s)) is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    async def _run(self, turn: Turn | None, status: PodStatus | None) -> None:
        while turn is not None and status is not None:
            await turn.run(status)
            raise_if_cancelled()
            status = self._fleet.status(self._pod_id)
            turn = self._next(status, loop_time_s()) if status is not None else None
        self.task = None
        self._look()

    def _next(self, status: PodStatus, now_s: float) -> Turn | None:
        return next((turn for turn in self.turns if turn.is_due(status, now_s)), None)

    def _wait_s(self, status: PodStatus, now_s: float) -> float | None:
        """Until the next check may be due; None if all have passed."""
        waits = (
            turn.next_s - now_s if turn.next_s > now_s else jittered(turn.check.every_s(status))
            for turn in self.turns
            if not turn.is_done
        )
        return min(waits, default=None)


@dataclass(slots=True, eq=False)
class Watch:
    """The lanes of all pods, as pods come and go."""

    fleet: Fleet
    table: Lanes
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
            lanes = [lane for pod_id in [*self._lanes] for lane in self._end(pod_id)]
            await cancel_all(lane.task for lane in lanes if lane.task is not None)

    def _on_change(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._end(pod.id)
            return
        if pod.id not in self._lanes:
            self._lanes[pod.id] = [_Lane(self.fleet, pod.id, checks) for checks in self.table]
        for lane in self._lanes[pod.id]:
            lane.changed(pod.epoch)

    def _end(self, pod_id: PodId) -> list[_Lane]:
        lanes = self._lanes.pop(pod_id, [])
        for lane in lanes:
            lane.end()
            for turn in lane.turns:
                turn.check.forget(pod_id)
        return lanes
