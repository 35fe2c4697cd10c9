"""Was this task cancelled while nobody noticed?

Client libraries now and then make a lost connection of a cancellation, or nothing at all: seen with redis-py and with
httpx. A task that goes on then would never end, and neither would whoever waits for it.
"""

from __future__ import annotations

import asyncio


def mind_cancellation() -> None:
    """Raise `CancelledError` if this task was cancelled. To be called in every endless loop that asks somebody else,
    after the question, answered or not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
