"""How long tests wait for an event. Only a failing test reaches it: a machine may stop a process for seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from router.config.schema import Limits

DEADLINE_S = 60.0
GENEROUS = Limits(connect_timeout_s=DEADLINE_S, first_byte_timeout_s=DEADLINE_S, idle_timeout_s=DEADLINE_S)
"""Timeouts of the router that no test may reach."""


async def until(condition: Callable[[], object]) -> None:
    """Run other tasks until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def running(feed: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a feed concurrently with the test, with a timeout, and cancel it at the end. A feed that failed fails the
    test."""
    task = asyncio.ensure_future(feed)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
