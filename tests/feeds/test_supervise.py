"""Feeds restart after errors."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from router.feeds.supervise import FIRST_WAIT_S, MAX_WAIT_S, STEADY_S, pause, supervise
from tests.kit.deadlines import DEADLINE_S

pytestmark = pytest.mark.anyio


class StopTest(BaseException):
    """Ends the test from within a sleep; no feed catches it."""


async def test_a_failing_feed_restarts_with_growing_waits() -> None:
    """The wait doubles up to a limit; an error that repeats is logged once, with its trace."""
    slept: list[float] = []

    async def feed() -> None:
        raise RuntimeError("broken")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 9:
            raise StopTest

    with capture_logs() as logs, pytest.raises(StopTest):
        await supervise("probe of a", feed, sleep=sleep)
    assert slept[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert slept[-2:] == [MAX_WAIT_S, MAX_WAIT_S]
    assert [(log["feed"], log["exc_info"]) for log in logs] == [("probe of a", True)]


async def test_a_failing_feed_logs_each_new_error() -> None:
    """Also the same one after the feed has run for long in between."""
    errors = iter(["a", "a", "b", "b", "steady", "b"])
    clock_s = 0.0

    async def feed() -> None:
        nonlocal clock_s
        error = next(errors, None)
        if error is None:
            raise StopTest
        clock_s += STEADY_S if error == "steady" else 0.0
        raise RuntimeError("b" if error == "steady" else error)

    async def at_once(_seconds: float) -> None:
        """No wait."""

    with capture_logs() as logs, pytest.raises(StopTest):
        await supervise("probe of a", feed, sleep=at_once, clock=lambda: clock_s)
    assert len(logs) == 3


async def test_a_feed_that_ran_for_long_restarts_with_the_first_wait() -> None:
    """Rare failures do not add up."""
    slept: list[float] = []
    clock_s = 0.0

    async def feed() -> None:
        nonlocal clock_s
        clock_s += STEADY_S if len(slept) == 2 else 0.0
        raise RuntimeError("broken")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise StopTest

    with capture_logs(), pytest.raises(StopTest):
        await supervise("load of a", feed, sleep=sleep, clock=lambda: clock_s)
    assert slept == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, FIRST_WAIT_S, 2 * FIRST_WAIT_S]


async def test_a_feed_that_returns_is_not_restarted() -> None:
    """`supervise` returns as well."""
    starts = 0

    async def feed() -> None:
        nonlocal starts
        starts += 1

    await supervise("once", feed)
    assert starts == 1


async def test_cancellation_passes_through() -> None:
    """At once, without a log line or a restart."""
    running = asyncio.Event()
    starts = 0

    async def feed() -> None:
        nonlocal starts
        starts += 1
        running.set()
        await asyncio.Event().wait()

    with capture_logs() as logs:
        task = asyncio.ensure_future(supervise("x", feed))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (starts, logs) == (1, [])


async def test_a_pause_ends_early_when_the_pod_changes() -> None:
    """It clears the event. Without a change it ends after the interval."""
    changed = asyncio.Event()
    changed.set()
    async with asyncio.timeout(DEADLINE_S):
        await pause(changed, 1e6)
        assert not changed.is_set()
        await pause(changed, 0.001)
