"""Exchanges what this process uses of its quotas for new shares of them, in the background.

A request that does not fit under the ceilings of this process waits for the next exchange, which begins at once, and no
longer than `MAX_WAIT_S`. All other requests wait for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from router.admission.sharing import CeilingReport, Grants, MeterSharing
from router.feeds.backoff import Backoff
from router.feeds.supervise import pause

INTERVAL_S, SHORTEST_INTERVAL_S = 0.05, 0.005
"""Time between two exchanges; while requests wait for shares, as near a limit, the shorter one."""
MAX_EXCHANGE_S = 0.5
"""An exchange that takes longer has failed: another process may use the share by then."""
MAX_WAIT_S = 0.5
"""A request waits for a round trip, but no longer than this. Then the local shares are used, which may be wrong by one
share: a shorter wait would cause that on a busy machine."""


@dataclass(slots=True, eq=False)
class QuotaFeed:
    """Runs the exchanges. `exchange` raises `OSError` or `redis.RedisError`, and then the local shares are used;
    `leave` is called when this process stops."""

    sharing: MeterSharing
    _exchange_shares: Callable[[Sequence[CeilingReport]], Awaitable[Grants]]
    _leave: Callable[[], Awaitable[None]] | None = None
    nodes: str = ""
    clock: Callable[[], float] = time.monotonic
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: asyncio.Future[None] | None = None

    async def run(self) -> None:
        backoff = Backoff("quotas", self.nodes)
        try:
            while True:
                if not await backoff.attempt(self.exchange):
                    continue
                await asyncio.sleep(SHORTEST_INTERVAL_S)
                await pause(self._wanted, INTERVAL_S)
        finally:
            self.sharing.lost(self.clock())
            if self._leave is not None:
                with suppress(RedisError, OSError):
                    await asyncio.shield(self._leave())

    async def exchange(self) -> None:
        """Exchange once. Raises `OSError` or `redis.RedisError`."""
        waiting, self._waiting = self._waiting, None
        try:
            async with asyncio.timeout(MAX_EXCHANGE_S):
                answer = await self._exchange_shares(self.sharing.reports(self.clock()))
            self.sharing.granted(answer, self.clock())
        except BaseException:
            self.sharing.lost(self.clock())
            raise
        finally:
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def next_exchange(self) -> None:
        """Wait until an exchange that begins now has ended; without an answer in time, use the local shares."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        self._wanted.set()
        done, _ = await asyncio.wait([self._waiting], timeout=MAX_WAIT_S)
        if not done:
            self.sharing.lost(self.clock())
