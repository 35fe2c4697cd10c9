"""Many calls by one timer of the event loop: a timer for each takes 8 us, and most are not needed when it fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import TypeAlias

RESOLUTION_S = 0.01

Call: TypeAlias = Callable[[float], object]
"""Receives the time in seconds of `monotonic`."""


class CoarseTimers:
    """Makes each call up to about `RESOLUTION_S` late. Calls cannot be cancelled: each must be harmless when it is not
    needed any more."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: list[tuple[float, int, Call]] = []
        """A heap by time."""
        self._is_running = False

    def call_later(self, delay_s: float, call: Call) -> None:
        """Call after `delay_s`."""
        loop = asyncio.get_running_loop()
        heappush(self._waiting, (loop.time() + delay_s, next(self._numbers), call))
        if not self._is_running:
            self._is_running = True
            loop.call_later(RESOLUTION_S, self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the calls that are due, and look again later while there are others."""
        loop_s, waiting = loop.time(), self._waiting
        try:
            while waiting and waiting[0][0] <= loop_s:
                heappop(waiting)[2](monotonic())
        finally:
            self._is_running = bool(waiting)
            if waiting:
                loop.call_later(RESOLUTION_S, self._run, loop)
