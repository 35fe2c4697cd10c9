"""A lock that tenants take in turn, and the count of requests that decides who takes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from router.admission.fair_order import FairOrder, Waiting
from router.admission.tenant import Tenant

MAX_AT_ONCE = 8
"""Requests of one owner that begin in one pass of the event loop; each takes up to a millisecond of it."""


class BurstCounter:
    """Counts the requests of each owner (a tenant or an address; "" for unknown ones) in one pass of the event loop."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def is_burst(self, owner: str) -> bool:
        """Count a request. Returns whether it should begin in a later pass."""
        begun = self._begun
        if not begun:
            asyncio.get_running_loop().call_soon(begun.clear)
        begun[owner] = count = begun.get(owner, 0) + 1
        return count > MAX_AT_ONCE and owner != ""


class FairTurns:
    """One turn at a time, in the order of weighted fair queueing by bytes (`admission/fair_order.py`). Of one tenant,
    the body of which the fewest bytes are done comes first: no short one waits for the end of a long one."""

    def __init__(self) -> None:
        self._order = FairOrder()
        self._places: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, tenant: Tenant, done_bytes: int, size_bytes: int) -> AsyncIterator[None]:
        one = Waiting(next(self._numbers), tenant, done_bytes, size_bytes, size_bytes)
        place = self._places[one.number] = asyncio.get_running_loop().create_future()
        self._order.add(one)
        self._next()
        try:
            await place
            yield
        finally:
            if self._places.pop(one.number, None) is not None:
                self._order.remove(one)
            elif not place.cancelled():
                self._is_taken = False
            asyncio.get_running_loop().call_soon(self._next)  # after this body asked for its next turn

    def _next(self) -> None:
        while not self._is_taken and (one := next(self._order.in_order(), None)) is not None:
            self._order.serve(one, one.prefill_ms)
            place = self._places.pop(one.number)
            if not place.cancelled():
                self._is_taken = True
                place.set_result(None)
