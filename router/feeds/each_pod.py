"""How does a feed keep an eye on every pod without one waiting for another?

One task a pod, from the moment it is found until it is gone. Within a task things happen one after the other, so no pod
has two of the same question under way. This file asks no pod anything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from router.cancellation import mind_cancellation
from router.feeds.supervise import supervise
from router.fleet.fleet import Fleet
from router.types import Pod, PodId, PodState

JITTER = 0.1
"""Intervals vary by this part, so that a fleet that was found at once is not asked at once for ever."""

Watch: TypeAlias = Callable[[PodId, asyncio.Event], Awaitable[None]]
"""Follows one pod for as long as it is there. The event is set whenever the pod's state or epoch changes."""


async def each_pod(name: str, fleet: Fleet, watch: Watch) -> None:
    """Run `watch` for each pod of the fleet, supervised, until cancelled."""
    news: dict[PodId, asyncio.Event] = {}
    changed = asyncio.Event()

    def tell(pod: Pod, _old: PodState, _new: PodState) -> None:
        changed.set()
        if pod.id in news:
            news[pod.id].set()

    unlisten = fleet.listen(tell)
    tasks: dict[PodId, asyncio.Task[None]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                changed.clear()
                present = {status.pod.id for status in fleet.snapshot.pods}
                for pod_id in tasks.keys() - present:
                    tasks.pop(pod_id).cancel()
                    del news[pod_id]
                for pod_id in present - tasks.keys():
                    news[pod_id] = asyncio.Event()
                    feed = partial(watch, pod_id, news[pod_id])
                    tasks[pod_id] = group.create_task(supervise(f"{name} {pod_id}", feed))
                await changed.wait()
    finally:
        unlisten()


async def pause(news: asyncio.Event, interval_s: float) -> None:
    """Wait for about `interval_s`, or less if there is news of the pod."""
    try:
        async with asyncio.timeout(interval_s * random.uniform(1 - JITTER, 1 + JITTER)):
            await news.wait()
    except TimeoutError:
        pass  # the usual case: nothing has happened
    mind_cancellation()
    news.clear()
