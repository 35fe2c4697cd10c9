"""Feeds that fail start again."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from router.feeds.supervise import FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S, supervise

pytestmark = pytest.mark.anyio


class Enough(BaseException):
    """Ends the test from within a sleep; no feed may catch it."""


async def test_a_failing_feed_starts_again_ever_more_slowly() -> None:
    """Each start is preceded by twice the wait, up to a limit, and every failure is logged with its trace."""
    slept: list[float] = []

    async def feed() -> None:
        raise RuntimeError("broken")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 9:
            raise Enough

    with capture_logs() as logs, pytest.raises(Enough):
        await supervise("probe of a", feed, sleep=sleep)
    assert slept[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert slept[-2:] == [LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert [(log["feed"], log["exc_info"]) for log in logs] == [("probe of a", True)] * 9


async def test_a_feed_that_had_recovered_waits_no_longer_than_at_first() -> None:
    """Failures that are a day apart are not one series."""
    slept: list[float] = []
    clock_s = 0.0

    async def feed() -> None:
        nonlocal clock_s
        clock_s += STEADY_S if len(slept) == 2 else 0.0
        raise RuntimeError("broken")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise Enough

    with capture_logs(), pytest.raises(Enough):
        await supervise("load of a", feed, sleep=sleep, clock=lambda: clock_s)
    assert slept == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, FIRST_WAIT_S, 2 * FIRST_WAIT_S]


async def test_a_feed_that_returns_is_done() -> None:
    """So is its supervision."""
    starts = 0

    async def feed() -> None:
        nonlocal starts
        starts += 1

    await supervise("once", feed)
    assert starts == 1


async def test_cancellation_passes_through() -> None:
    """At once, without a log line and without a new start."""
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
