"""How long do transfers take that share their links?

Each flow needs a fixed time first and then moves bytes, at the pace of the most crowded place that it passes: a place
(a pod's network card, its PCIe bus) shares its bandwidth equally among the flows through it, up to `MAX_FLOWS` of
them; who comes later waits until one has ended. No clock here: callers say what time it is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

Place: TypeAlias = Hashable

MAX_FLOWS = 32
"""Through one place at a time, as transfer engines bound what they have under way."""


@dataclass(slots=True)
class _Flow:
    what: Any
    places: tuple[Place, ...]
    left_bytes: float
    bytes_per_ms: float = 0.0
    since_ms: float = 0.0
    version: int = 0


class LinkSharing:
    """Flows under way. `bandwidths`: bytes a millisecond of each place."""

    def __init__(self, bandwidths: Mapping[Place, float]) -> None:
        self._bandwidths = bandwidths
        self._through: dict[Place, dict[int, _Flow]] = {}
        self._starting: dict[int, _Flow] = {}
        self._events: list[tuple[float, int, int]] = []
        self._flows: dict[int, _Flow] = {}
        self._ids = count()
        self._queued: dict[Place, deque[tuple[int, _Flow]]] = {}
        """Past their fixed time, with no room at one of their places: in order at the last of them."""

    @property
    def next_ms(self) -> float:
        """When something ends next; infinite while nothing is under way."""
        while self._events:
            at_ms, flow_id, version = self._events[0]
            flow = self._flows.get(flow_id)
            if flow is not None and flow.version == version:
                return at_ms
            heapq.heappop(self._events)
        return float("inf")

    def start(self, what: Any, places: tuple[Place, ...], kv_bytes: float, t0_ms: float, now_ms: float) -> None:
        """Begin a transfer; `advance` returns `what` when it has ended."""
        flow_id = next(self._ids)
        flow = _Flow(what, places, kv_bytes)
        self._flows[flow_id] = self._starting[flow_id] = flow
        heapq.heappush(self._events, (now_ms + t0_ms, flow_id, flow.version))

    def flows_through(self, place: Place) -> int:
        """How many share that place now."""
        return len(self._through.get(place, ()))

    def advance(self, now_ms: float) -> list[Any]:
        """Everything up to now; what has ended meanwhile."""
        ended: list[Any] = []
        while self.next_ms <= now_ms:
            at_ms, flow_id, _ = heapq.heappop(self._events)
            flow = self._flows[flow_id]
            if self._starting.pop(flow_id, None) is not None:
                self._queued.setdefault(flow.places[-1], deque()).append((flow_id, flow))
            else:
                self._end(flow_id, flow, at_ms)
                ended.append(flow.what)
            self._let_in(at_ms)
        return ended

    def _end(self, flow_id: int, flow: _Flow, now_ms: float) -> None:
        del self._flows[flow_id]
        for place in flow.places:
            del self._through[place][flow_id]
        self._share_anew(flow.places, now_ms)

    def _let_in(self, now_ms: float) -> None:
        """Whoever is first in a line and has room everywhere."""
        for line in self._queued.values():
            while line and all(self.flows_through(place) < MAX_FLOWS for place in line[0][1].places):
                flow_id, flow = line.popleft()
                for place in flow.places:
                    self._through.setdefault(place, {})[flow_id] = flow
                flow.since_ms = now_ms
                self._share_anew(flow.places, now_ms)

    def _share_anew(self, places: tuple[Place, ...], now_ms: float) -> None:
        touched = {flow_id: flow for place in places for flow_id, flow in self._through.get(place, {}).items()}
        for flow_id, flow in touched.items():
            flow.left_bytes -= flow.bytes_per_ms * (now_ms - flow.since_ms)
            flow.since_ms = now_ms
            flow.bytes_per_ms = min(self._bandwidths[place] / len(self._through[place]) for place in flow.places)
            flow.version += 1
            end_ms = now_ms + max(flow.left_bytes, 0.0) / flow.bytes_per_ms
            heapq.heappush(self._events, (end_ms, flow_id, flow.version))
