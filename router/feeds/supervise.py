"""Runs feeds as background tasks: restarts them after errors, and runs one task for each pod until it is cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import structlog

from router.fleet.fleet import Fleet
from router.fleet.retry_pause import retry_pause_s
from router.types import Pod, PodId, PodState

FIRST_WAIT_S = 0.2
MAX_WAIT_S = 10.0
POLL_S = 0.02
STEADY_S = 60.0
"""A feed that ran for this long resets its backoff."""
STEP = 25
"""Pods that are read, built or added to the fleet in one turn of the event loop: the first list of 500 pods costs 50 ms
of CPU, a step about 2 ms."""
JITTER = 0.1
"""Relative variation of intervals, so that pods that were added together are not polled together."""

Feeds: TypeAlias = Mapping[str, Callable[[], Awaitable[None]]]
"""Background tasks by name. Each runs until it is cancelled."""
T = TypeVar("T")
PodTask: TypeAlias = Callable[[PodId, asyncio.Event], Awaitable[None]]
"""Runs while the pod exists. The event is set when the pod's state or epoch changes."""

log = structlog.get_logger()


async def supervise(
    name: str,
    feed: Callable[[], Awaitable[None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] | None = None,
) -> None:
    """Run `feed` until it returns or this task is cancelled. Restart it with backoff when it raises. An error that
    repeats is logged once until the feed has run for `STEADY_S`."""
    now_s = clock or asyncio.get_running_loop().time
    failures, logged = 0, ""
    while True:
        started_s = now_s()
        try:
            return await feed()
        except Exception as error:
            if now_s() - started_s >= STEADY_S:
                failures, logged = 0, ""
            failures += 1
            wait_s = retry_pause_s(failures, FIRST_WAIT_S, MAX_WAIT_S)
            if repr(error) != logged:
                logged = repr(error)
                log.exception("feed failed; restarting", feed=name, wait_s=wait_s)
        await sleep(wait_s)


@asynccontextmanager
async def running(feeds: Feeds) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(supervise(name, feed), name=name) for name, feed in feeds.items()]
    try:
        yield
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    waited = list(tasks)
    for task in waited:
        task.cancel()
    await asyncio.gather(*waited, return_exceptions=True)


async def each_pod(name: str, fleet: Fleet, run: PodTask) -> None:
    """Run `run` supervised for each pod of the fleet, as pods come and go, until cancelled."""
    pod_changed: dict[PodId, asyncio.Event] = {}
    fleet_changed = asyncio.Event()

    def on_change(pod: Pod, _old: PodState, _new: PodState) -> None:
        fleet_changed.set()
        if pod.id in pod_changed:
            pod_changed[pod.id].set()

    unlisten = fleet.listen(on_change)
    tasks: dict[PodId, asyncio.Task[None]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                fleet_changed.clear()
                present = {status.pod.id for status in fleet.snapshot.pods}
                for pod_id in tasks.keys() - present:
                    tasks.pop(pod_id).cancel()
                    del pod_changed[pod_id]
                for pod_id in present - tasks.keys():
                    pod_changed[pod_id] = asyncio.Event()
                    feed = partial(run, pod_id, pod_changed[pod_id])
                    tasks[pod_id] = group.create_task(supervise(f"{name} {pod_id}", feed))
                await fleet_changed.wait()
    finally:
        unlisten()


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn of the event loop after each `STEP`."""
    for number, item in enumerate(items):
        if number % STEP == STEP - 1:
            await asyncio.sleep(0)
        yield item


def loop_time_s() -> float:
    return asyncio.get_running_loop().time()


async def wait_until(condition: Callable[[], object], timeout_s: float) -> bool:
    """Poll a condition that no single object announces. Returns whether it became true in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    return bool(condition())


async def pause(changed: asyncio.Event, interval_s: float) -> None:
    """Wait for `interval_s` with jitter, or until the pod changes."""
    interval_s *= random.uniform(1 - JITTER, 1 + JITTER)
    # Half the CPU of `asyncio.timeout`, which cancels the task.
    timer = asyncio.get_running_loop().call_later(interval_s, changed.set)
    try:
        await changed.wait()
    finally:
        timer.cancel()
    raise_if_cancelled()
    changed.clear()


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if this task was cancelled. Call it in every endless loop after each I/O call.

    redis-py and httpx sometimes turn a cancellation into a lost connection or drop it. A task that continues would then
    never end, and a task that waits for it would hang."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
