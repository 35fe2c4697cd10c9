"""Bounds what one client begins in a turn of the event loop, so that requests of others do not wait for all of it.

To read and decide a request takes a quarter of a millisecond. Who sends many at once begins a few in each turn, and all
other work comes in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_COST = 8
"""What an owner may begin in a turn: requests, and in addition their `COST_BYTES`. The last one may exceed it."""
COST_BYTES = 16 * 1024


class FairStarts:
    """An owner is a tenant or the address of a client; "" stands for all unknown ones, which have no limit."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        """The cost of what each owner has begun in this turn."""
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def may_begin(self, owner: str, size_bytes: int) -> bool:
        """Whether a request may begin now; else `wait`."""
        if not owner:
            return True
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
        before = self._begun.get(owner, 0)
        if before >= MAX_COST or owner in self._waiting:
            return False
        self._begun[owner] = before + 1 + size_bytes // COST_BYTES
        return True

    async def wait(self, owner: str, size_bytes: int) -> None:
        """Wait until it may begin, after the earlier ones of its owner."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((1 + size_bytes // COST_BYTES, place))
        await place

    def _next_turn(self) -> None:
        self._begun.clear()
        for owner, waiting in list(self._waiting.items()):
            begun = 0
            while waiting and begun < MAX_COST:
                cost, place = waiting.popleft()
                if not place.done():
                    place.set_result(None)
                    begun += cost
            self._begun[owner] = begun
            if not waiting:
                del self._waiting[owner]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
