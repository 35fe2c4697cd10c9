"""How long do transfers take that share links?

A transfer waits for a fixed setup time and then moves bytes at the rate of its most crowded place. A place (a pod's
network card, its PCIe bus) divides its bandwidth equally among up to `MAX_TRANSFERS`; later transfers wait. The caller
passes the time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

LinkEnd: TypeAlias = Hashable

MAX_TRANSFERS = 32
"""Through one place at a time, as transfer engines limit theirs."""


@dataclass(slots=True, eq=False)
class _Transfer:
    number: int
    tag: Any
    places: tuple[LinkEnd, ...]
    left_bytes: float
    bytes_per_ms: float = 0.0
    since_ms: float = 0.0
    version: int = 0
    """The number of the only valid event in the heap; 0 during the setup time, -1 after the end."""


class LinkSharing:
    """All transfers in progress. `bandwidths`: bytes per millisecond of each place."""

    def __init__(self, bandwidths: Mapping[LinkEnd, float]) -> None:
        self._bandwidths = bandwidths
        self._through: dict[LinkEnd, dict[_Transfer, None]] = {}
        self._events: list[tuple[float, int, int, _Transfer]] = []
        self._numbers = count()
        self._queued: dict[LinkEnd, deque[_Transfer]] = {}
        """Transfers past their setup time that wait for room, by the last of their places."""

    @property
    def next_ms(self) -> float:
        """When the next event is due; infinite without a transfer."""
        while self._events:
            at_ms, _, version, transfer = self._events[0]
            if transfer.version == version:
                return at_ms
            heapq.heappop(self._events)
        return math.inf

    def start(self, tag: Any, places: tuple[LinkEnd, ...], kv_bytes: float, t0_ms: float, now_ms: float) -> None:
        """Begin a transfer. `advance` returns its `tag` when it is complete."""
        self._schedule(_Transfer(next(self._numbers), tag, places, kv_bytes), now_ms + t0_ms)

    def transfers_through(self, place: LinkEnd) -> int:
        return len(self._through.get(place, ()))

    def advance(self, now_ms: float) -> list[Any]:
        """Process all events up to `now_ms`. Returns the tags of completed transfers."""
        completed: list[Any] = []
        while self.next_ms <= now_ms:
            at_ms, _, version, transfer = heapq.heappop(self._events)
            if version == 0:
                self._queued.setdefault(transfer.places[-1], deque()).append(transfer)
            else:
                transfer.version = -1
                for place in transfer.places:
                    del self._through[place][transfer]
                self._divide_bandwidth(transfer.places, at_ms)
                completed.append(transfer.tag)
            self._start_queued(at_ms)
        return completed

    def _schedule(self, transfer: _Transfer, at_ms: float) -> None:
        heapq.heappush(self._events, (at_ms, transfer.number, transfer.version, transfer))

    def _start_queued(self, now_ms: float) -> None:
        """Start the first transfers of each queue, while all of their places have room."""
        for queue in self._queued.values():
            while queue and all(self.transfers_through(place) < MAX_TRANSFERS for place in queue[0].places):
                transfer = queue.popleft()
                for place in transfer.places:
                    self._through.setdefault(place, {})[transfer] = None
                transfer.since_ms = now_ms
                self._divide_bandwidth(transfer.places, now_ms)

    def _divide_bandwidth(self, places: tuple[LinkEnd, ...], now_ms: float) -> None:
        for transfer in dict.fromkeys(one for place in places for one in self._through.get(place, ())):
            transfer.left_bytes -= transfer.bytes_per_ms * (now_ms - transfer.since_ms)
            transfer.since_ms = now_ms
            rates = (self._bandwidths[place] / len(self._through[place]) for place in transfer.places)
            transfer.bytes_per_ms = min(rates)
            transfer.version += 1
            self._schedule(transfer, now_ms + max(transfer.left_bytes, 0.0) / transfer.bytes_per_ms)
