"""Fault injection of a mock engine: which faults are armed, and how often each still occurs.

`POST /_fault` or code arms a fault; the affected code takes it with `FaultBoard.take`.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Literal

import msgspec


class FaultKind(StrEnum):
    """Kinds of faults."""

    STATUS = "status"
    """Respond with `status` and an error body."""
    HANG = "hang"
    """Accept the request and never respond."""
    RESET = "reset"
    """Reset the connection before any header."""
    CUT = "cut"
    """Close the connection after `after_chunks` tokens of a stream, or after half of a unary body."""
    RAW = "raw"
    """Write `raw` instead of a response, `piece_bytes` at a time, then do `then`."""
    SLOW = "slow"
    """Wait `pause_s` before each part of the response."""
    UNHEALTHY = "unhealthy"
    """`GET /health` returns 503."""
    LOSE_EVENTS = "lose_events"
    """Skip a batch of KV events, but not its sequence number; `replayable` keeps the batch for replay."""
    RESTART = "restart"
    """Immediate: restart. Connections close, the cache is empty, the event sequence starts at 0."""
    REFUSE = "refuse"
    """Immediate: close connections and accept no new one, for `for_s` seconds or until `heal`."""
    DIE = "die"
    """Immediate: RESTART and REFUSE."""
    EXPIRE = "expire"
    """Immediate: end the leases of all KV held for decode legs."""
    DIE_BEFORE_ANSWER = "die_before_answer"
    """DIE after a prefill leg is computed, before its response."""
    DIE_AFTER_ANSWER = "die_after_answer"
    """DIE after the response to a prefill leg."""
    NO_PARAMS = "no_params"
    """Respond to a prefill leg without transfer parameters and hold no KV for it."""
    LOAD_FAILS = "load_fails"
    """A decode leg fails to load its KV."""


REQUEST_FAULTS = frozenset(
    {FaultKind.STATUS, FaultKind.HANG, FaultKind.RESET, FaultKind.CUT, FaultKind.RAW, FaultKind.SLOW}
)
"""Faults of generation and embedding requests."""

PREFILL_FAULTS = frozenset({FaultKind.DIE_BEFORE_ANSWER, FaultKind.DIE_AFTER_ANSWER, FaultKind.NO_PARAMS})
"""Faults of prefill legs."""
DECODE_FAULTS = frozenset({FaultKind.LOAD_FAILS})
"""Faults of decode legs."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault. `count` is how often it occurs; None: until cleared."""

    kind: FaultKind
    count: int | None = 1
    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    after_chunks: int = 1
    pause_s: float = 0.05
    raw: str = ""
    """Bytes as Latin-1."""
    piece_bytes: int = 65536
    then: Literal["close", "reset", "hang"] = "close"
    for_s: float | None = None
    replayable: bool = True


class FaultBoard:
    """Armed faults, oldest first."""

    def __init__(self) -> None:
        self._armed: list[tuple[Fault, int | None]] = []

    @property
    def armed(self) -> tuple[Fault, ...]:
        """Faults that are still to occur."""
        return tuple(fault for fault, _ in self._armed)

    def arm(self, fault: Fault) -> None:
        """Add a fault."""
        self._armed.append((fault, fault.count))

    def clear(self) -> None:
        """Remove all faults."""
        self._armed.clear()

    def take(self, kinds: frozenset[FaultKind]) -> Fault | None:
        """The oldest armed fault of these kinds, counted once, or None."""
        for at, (fault, left) in enumerate(self._armed):
            if fault.kind in kinds:
                if left is not None and left <= 1:
                    del self._armed[at]
                elif left is not None:
                    self._armed[at] = (fault, left - 1)
                return fault
        return None
