"""How late does the event loop come to what is due?

Whatever computes for long in the loop, or a machine that gives it no core, delays every request by as much; a timer
that looks how late it is feels the same. This file never finds out who was to blame.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

LOOK_S = 0.01
"""Between two looks. A stall of half of it is met by one of two."""
IDLE_LOOK_S, IDLE_LOOKS = 0.05, 100
"""Between two looks after so many at which nobody was being served: nobody is made to wait then, and a router that has
nothing to do mostly woke up to look."""


def call_later(delay_s: float, call: Callable[[float], None]) -> asyncio.TimerHandle:
    """Call once, in `delay_s`, with the seconds that it then came late (0 or more). The loop's own clock is too coarse
    for that: uvloop's counts milliseconds."""
    due_s = time.monotonic() + delay_s
    return asyncio.get_running_loop().call_later(delay_s, lambda: call(max(0.0, time.monotonic() - due_s)))


Later: TypeAlias = Callable[[float, Callable[[float], None]], asyncio.TimerHandle]


class LoopLag:
    """Tells `observe` how late, in seconds, the loop came to each look. `serves`: is anybody being served?"""

    def __init__(self, observe: Callable[[float], None], serves: Callable[[], bool], later: Later = call_later) -> None:
        self._observe = observe
        self._serves = serves
        self._later = later
        self._idle_looks = 0

    async def run(self) -> None:
        """Until cancelled."""
        self._look_later()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._later(LOOK_S if self._idle_looks < IDLE_LOOKS else IDLE_LOOK_S, self._look)

    def _look(self, late_s: float) -> None:
        self._observe(late_s)
        self._idle_looks = 0 if self._serves() else self._idle_looks + 1
        self._look_later()
