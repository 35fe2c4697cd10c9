"""What keeps a feed running?

Runs it for as long as the program lives; when it raises, says so and starts it again, waiting longer each time while it
keeps failing. Cancellation passes through. This file knows no feed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
STEADY_S = 60.0
"""A feed that ran for this long had recovered: its next wait is the first one again."""

log = structlog.get_logger()


async def supervise(
    name: str,
    feed: Callable[[], Awaitable[None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] | None = None,
) -> None:
    """Run `feed` until cancelled, whatever happens to it. A feed that returns is done."""
    now_s = clock or asyncio.get_running_loop().time
    wait_s = FIRST_WAIT_S
    while True:
        started_s = now_s()
        try:
            return await feed()
        except Exception:
            if now_s() - started_s >= STEADY_S:
                wait_s = FIRST_WAIT_S
            log.exception("feed failed; starting it again", feed=name, wait_s=wait_s)
        await sleep(wait_s)
        wait_s = min(wait_s * 2, LONGEST_WAIT_S)
