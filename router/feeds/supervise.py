"""Runs feeds as background tasks, and restarts them after errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import structlog

from router.fleet.retry_pause import retry_pause_s

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


def jittered(interval_s: float) -> float:
    """With some variation, so that pods that were added together are not asked together."""
    return interval_s * random.uniform(1 - JITTER, 1 + JITTER)


async def pause(changed: asyncio.Event, interval_s: float) -> None:
    """Wait for `interval_s` with jitter, or until the event is set. Clears it."""
    # Half the CPU of `asyncio.timeout`, which cancels the task.
    timer = asyncio.get_running_loop().call_later(jittered(interval_s), changed.set)
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
