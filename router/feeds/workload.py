"""Which work do the other replicas of the router see to?

Tells them ours and adds theirs to the ledger, many times a second, so that two routers do not both send to the same
idle pod. Without Redis there is only our own work. This file never decides anything.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis.exceptions import RedisError

from router.feeds.backoff import Backoff
from router.fleet.ledger import Ledger
from router.stores.shared_state import SharedWorkload

INTERVAL_S = 0.04


class WorkloadFeed:
    """Keeps `ledger.others` fresh."""

    def __init__(self, workload: SharedWorkload, ledger: Ledger) -> None:
        self._workload = workload
        self._ledger = ledger
        self.replicas = 0
        """Other routers that were heard of lately."""

    async def run(self) -> None:
        """Exchange until cancelled."""
        backoff = Backoff("work of the other routers")
        try:
            while True:
                if await backoff.attempt(self._exchange):
                    await asyncio.sleep(INTERVAL_S)
                else:
                    self.replicas = 0
                    self._ledger.others(())
        finally:
            with suppress(RedisError, OSError):  # the row expires by itself
                await asyncio.shield(self._workload.leave())

    async def _exchange(self) -> None:
        others = await self._workload.exchange(self._ledger.own())
        self.replicas = len(others)
        self._ledger.others(others.values())
