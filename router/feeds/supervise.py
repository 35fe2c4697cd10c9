"""What keeps a feed running?

Runs it for as long as the program lives; when it raises, says so and starts it again, waiting longer each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0

log = structlog.get_logger()


async def supervise(name: str, feed: Callable[[], Awaitable[None]]) -> None:
    """Run `feed` until cancelled, whatever happens to it. A feed that returns is done."""
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return await feed()
        except Exception:
            log.exception("feed failed; starting it again", feed=name, wait_s=wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, LONGEST_WAIT_S)
