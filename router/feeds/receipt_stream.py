"""How do receipts get into a Redis stream?

Lines are taken without waiting and sent in batches; the stream keeps about so many. Where Redis does not take them they
are lost and counted: no request ever waits for one. This file never reads a line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from router.feeds.backoff import Backoff
from router.stores.redis_connection import RedisConnection

GATHER_S = 0.2
BATCH_LINES = 500
MOST_WAITING = 2000


class ReceiptStream:
    """One stream. `lost` is told how many lines could not be sent."""

    def __init__(self, connection: RedisConnection, key: str, maxlen: int, lost: Callable[[int], None]) -> None:
        self._connection = connection
        self._key = key
        self._maxlen = maxlen
        self._lost = lost
        self._waiting: deque[bytes] = deque()

    def write(self, line: bytes) -> None:
        """Send it soon; or never, while too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            self._lost(1)
        else:
            self._waiting.append(line)

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff("the stream of receipts")
        while True:
            if len(self._waiting) < BATCH_LINES:
                await asyncio.sleep(GATHER_S)
            if self._waiting:
                await backoff.attempt(self.send)

    async def send(self) -> None:
        """One batch. Raises `redis.RedisError`, and then its lines are lost."""
        lines = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_LINES))]
        try:
            async with self._connection.client.pipeline(transaction=False) as pipeline:
                for line in lines:
                    pipeline.xadd(self._key, {"line": line}, maxlen=self._maxlen, approximate=True)
                await pipeline.execute()
        except BaseException:
            self._lost(len(lines))
            raise
