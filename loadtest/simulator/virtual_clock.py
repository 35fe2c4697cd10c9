"""Virtual time, and the calls that are due in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any


class VirtualClock:
    """Milliseconds that pass from one call to the next. Calls at the same time run in the order of `call_at`."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = count()

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000

    @property
    def next_ms(self) -> float:
        """When the next call is due; infinite without one."""
        return self._heap[0][0] if self._heap else math.inf

    def call_at(self, when_ms: float, callback: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when_ms, next(self._ids), callback, args))

    def call_in(self, after_ms: float, callback: Callable[..., None], *args: Any) -> None:
        self.call_at(self.now_ms + after_ms, callback, *args)

    def run_next(self) -> None:
        self.now_ms, _, callback, args = heapq.heappop(self._heap)
        callback(*args)
