"""Sends waiting requests at the times that their queue asks for, on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable

from router.request.queues import ModelQueue, RequestQueues
from router.sim.virtual.virtual_clock import VirtualClock


class QueueCalls:
    """The calls of one model's queue. `refresh` is called before waiting requests are decided again."""

    def __init__(self, queues: RequestQueues, clock: VirtualClock, refresh: Callable[[], None]) -> None:
        self._clock = clock
        self._refresh = refresh
        self._latest = 0
        """The number of the only call that counts."""
        queues.on_change = self._call_in

    def _call_in(self, queue: ModelQueue, after_ms: float = 0.0) -> None:
        self._latest += 1
        self._clock.call_in(after_ms, self._send, queue, self._latest)

    def _send(self, queue: ModelQueue, number: int) -> None:
        if number != self._latest or not queue:
            return
        self._refresh()
        wait_ms = queue.send_next(self._clock.now_s)
        if wait_ms < math.inf:
            self._call_in(queue, wait_ms)
