"""The messages that workers exchange, and the recent dispatches that a snapshot contains."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

from router.fleet.breaker import FailureRecord
from router.observe.calibrator import SpeedReport
from router.types import InFlight, PodId, PodLoad

MAX_RECENT_BYTES = 1 << 20
"""Block hashes of recent dispatches: about a thousand prompts of 2K tokens. Well below `bus.MAX_UNSENT_BYTES`."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """A prompt was sent to a pod. `blocks` are 64-bit hashes in the byte order of this machine."""

    pod: PodId
    blocks: bytes
    ttl_s: float
    capacity_blocks: Annotated[int, msgspec.Meta(ge=0)] | None


class AdminCommand(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The state that an admin call asked for, and when. Of two commands on one subject the later one wins."""

    at_s: float
    wanted: str


class WorkerUpdate(msgspec.Struct, omit_defaults=True):
    """State of one worker that changed. A `snapshot` replaces all in-flight work that the worker reported before."""

    snapshot: bool = False
    work: dict[PodId, InFlight | None] = {}
    failures: dict[PodId, FailureRecord | None] = {}
    dispatched: list[Dispatch] = []
    reports: list[SpeedReport] = []
    loads: dict[PodId, PodLoad] = {}
    commands: dict[str, AdminCommand] = {}
    calibration: bytes = b""
    ready_pods: list[PodId] = []


class RecentDispatches:
    """The last dispatches of this worker, oldest first. The size is bounded, so a busy worker keeps a shorter time."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, Dispatch]] = deque()
        self._bytes = 0

    def add(self, dispatch: Dispatch, now_s: float) -> None:
        """Append one; evicts the oldest above `MAX_RECENT_BYTES`."""
        self._sent.append((now_s, dispatch))
        self._bytes += len(dispatch.blocks)
        while self._bytes > MAX_RECENT_BYTES:
            self._bytes -= len(self._sent.popleft()[1].blocks)

    def forget(self, pod: PodId) -> None:
        """Drop the dispatches to a pod whose cache is gone. O(dispatches)."""
        self._sent = deque(one for one in self._sent if one[1].pod != pod)
        self._bytes = sum(len(dispatch.blocks) for _, dispatch in self._sent)

    def unexpired(self, now_s: float) -> list[Dispatch]:
        """The dispatches whose TTL has not passed."""
        return [dispatch for at_s, dispatch in self._sent if at_s + dispatch.ttl_s > now_s]
