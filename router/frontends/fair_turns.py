"""A lock that tenants take in turn, and the count of requests that decides who takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

from router.admission.fair_order import FairOrder, Waiting
from router.admission.tenant import Tenant

INLINE_BYTES = 1024 * 1024
"""Larger bodies are decoded and edited in a thread: 32 MiB hold the interpreter for 15 ms."""
MAX_AT_ONCE = 2
"""Requests of one owner that begin in one pass of the event loop; each takes up to a millisecond of it."""
_Result = TypeVar("_Result")


class BurstPlaces:
    """Lets few requests of each owner (a tenant or an address; "" for unknown ones) begin in one pass of the event
    loop, which reads in between what others have sent."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def place(self, owner: str) -> asyncio.Future[None] | None:
        """Count a request. Returns what it should wait for before it begins; None if that is nothing."""
        begun = self._begun
        if not begun and not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_pass)
        begun[owner] = count = begun.get(owner, 0) + 1
        if count <= MAX_AT_ONCE or owner == "":
            return None
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        return place

    def _next_pass(self) -> None:
        self._begun.clear()
        for owner, places in list(self._waiting.items()):
            self._begun[owner] = MAX_AT_ONCE
            for _ in range(min(MAX_AT_ONCE, len(places))):
                if not (place := places.popleft()).done():
                    place.set_result(None)
            if not places:
                del self._waiting[owner]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_pass)


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
        one = Waiting(tenant, number=next(self._numbers), start_by_s=done_bytes, prefill_ms=size_bytes)
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

    async def run(
        self,
        tenant: Tenant,
        body: bytes,
        work: Callable[..., _Result],
        *arguments: Any,
        inline_bytes: int = INLINE_BYTES,
    ) -> _Result:
        """The result of `work(*arguments)` on a body. Larger bodies are worked on in a thread, one at a time: a call of
        a decoder holds the interpreter in any thread, but the event loop runs between two calls."""
        if len(body) <= inline_bytes:
            return work(*arguments)
        async with self.turn(tenant, len(body), len(body)):
            return await asyncio.to_thread(work, *arguments)

    def _next(self) -> None:
        while not self._is_taken and (one := next(self._order.in_order(), None)) is not None:
            self._order.serve(one, one.prefill_ms)
            place = self._places.pop(one.number)
            if not place.cancelled():
                self._is_taken = True
                place.set_result(None)
