"""When is it time for what was to happen later, if nothing happens before?

One timer of the event loop for any number of appointments, nearly all of which are called off: the loop's own cost four
times as much each. This file does not know what it calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

import msgspec

SPARE = 1024
"""How many appointments that were called off may be kept until their time has come, beyond as many as stand."""


class Appointment(msgspec.Struct, order=True):
    """What is called at `at_s`, of the loop's clock, unless it was called off."""

    at_s: float
    number: int
    call: Callable[[], None] | None


class Due:
    """Appointments of one event loop."""

    def __init__(self) -> None:
        self._heap: list[Appointment] = []
        self._numbers = count()
        self._called_off = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap) - self._called_off

    def after(self, wait_s: float, call: Callable[[], None]) -> Appointment:
        """Have it called once, in so many seconds. It must not raise."""
        loop = asyncio.get_running_loop()
        made = Appointment(loop.time() + wait_s, next(self._numbers), call)
        heappush(self._heap, made)
        if self._heap[0] is made:
            self._wait(loop)
        return made

    def call_off(self, made: Appointment) -> None:
        """Do not call it. Again, or after it was called, it changes nothing."""
        if made.call is None:
            return
        made.call = None
        self._called_off += 1
        if self._called_off > SPARE + len(self):
            self._heap = [one for one in self._heap if one.call]
            heapify(self._heap)
            self._called_off = 0

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._heap[0].at_s, self._keep, loop) if self._heap else None

    def _keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call what is due."""
        now_s = loop.time()
        while self._heap and self._heap[0].at_s <= now_s:
            made = heappop(self._heap)
            call, made.call = made.call, None
            if call is None:
                self._called_off -= 1
            else:
                call()
        self._timer = None
        self._wait(loop)
