"""What did this worker send where lately?

The last dispatches of prompts, for a worker that begins: while few come, they reach far back, and while many come, it
hears enough of new ones soon. This file never reads a clock.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

from router.types import PodId

MOST_BYTES = 1 << 20
"""Of block hashes: a thousand prompts of 2K tokens. Well below what a worker may leave untaken."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """A prompt was sent to a pod; `blocks` as 64-bit numbers of this machine."""

    pod: PodId
    blocks: bytes
    ttl_s: float
    capacity_blocks: Annotated[int, msgspec.Meta(ge=0)] | None


class Recent:
    """Dispatches, oldest first."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, Dispatch]] = deque()
        self._bytes = 0

    def add(self, sent: Dispatch, now_s: float) -> None:
        """One more; the oldest go."""
        self._sent.append((now_s, sent))
        self._bytes += len(sent.blocks)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._sent.popleft()[1].blocks)

    def forget(self, pod: PodId) -> None:
        """What the pod had is gone. O(dispatches)."""
        self._sent = deque(one for one in self._sent if one[1].pod != pod)
        self._bytes = sum(len(sent.blocks) for _, sent in self._sent)

    def alive(self, now_s: float) -> list[Dispatch]:
        """Those whose time is not up."""
        return [sent for at_s, sent in self._sent if at_s + sent.ttl_s > now_s]
