"""How late does the event loop run its timers?

A long computation in the loop, or a machine without a free core, delays every request as it delays a timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL_S = 0.01
"""Interval between two samples. A stall of half this time delays one sample in two."""
IDLE_INTERVAL_S, IDLE_AFTER_SAMPLES = 0.05, 100
"""The longer interval after this number of samples without a request in flight: an idle router rarely wakes up."""


def call_later(delay_s: float, call: Callable[[float], None]) -> asyncio.TimerHandle:
    """Call once, in `delay_s`, with the seconds by which the call is late (0 or more). The loop's own clock is too
    coarse: uvloop's counts milliseconds."""
    due_s = time.monotonic() + delay_s
    return asyncio.get_running_loop().call_later(delay_s, lambda: call(max(0.0, time.monotonic() - due_s)))


class LoopLag:
    """Passes the lateness of the loop in seconds to `observe`. `is_serving`: whether requests are in flight."""

    def __init__(self, observe: Callable[[float], None], is_serving: Callable[[], bool]) -> None:
        self._observe = observe
        self._is_serving = is_serving
        self._idle_samples = 0

    async def run(self) -> None:
        self._schedule()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = call_later(
            INTERVAL_S if self._idle_samples < IDLE_AFTER_SAMPLES else IDLE_INTERVAL_S, self._sample
        )

    def _sample(self, late_s: float) -> None:
        self._observe(late_s)
        self._idle_samples = 0 if self._is_serving() else self._idle_samples + 1
        self._schedule()
