"""Detects cancellations that a client library swallowed.

redis-py and httpx sometimes turn a cancellation into a lost connection or drop it. A task that continues would then
never end, and a task that waits for it would hang.
"""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if this task was cancelled. Call it in every endless loop after each I/O call."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
