"""Fault injection of a mock engine: the faults that are armed, and how often each will still occur.

`POST /_fault` and `MockEngine.inject` arm faults. Code that can fail calls `FaultBoard.take`.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class FaultKind(StrEnum):
    STATUS = "status"
    """Respond with `status` and an error body."""
    HANG = "hang"
    """Accept the request and never respond."""
    RESET = "reset"
    """Reset the connection before any header."""
    CUT = "cut"
    """Close the connection after `after_chunks` tokens of a stream, or after half of a unary body."""
    SILENCE = "silence"
    """Send nothing after `after_chunks` tokens of a stream, and leave its connection open."""
    ABORT = "abort"
    """End a stream after `after_chunks` tokens with reason `abort`, usage and `[DONE]`."""
    RAW = "raw"
    """Write `raw` instead of a response, `piece_bytes` at a time, then close, reset or hang, as `then` says."""
    SLOW = "slow"
    """Wait `pause_s` before each part of the response."""
    UNHEALTHY = "unhealthy"
    """`GET /health` returns 503, or does not respond if `then` is `hang`."""
    NO_METRICS = "no_metrics"
    """The same for `GET /metrics`."""
    LOSE_EVENTS = "lose_events"
    """Use a sequence number without sending its batch of KV events. With `replayable`, replay returns the batch."""
    RESTART = "restart"
    """Immediate: restart. Connections close, the cache is empty, the event sequence starts at 0."""
    REFUSE = "refuse"
    """Immediate: close connections and accept no new one, for `for_s` seconds or until `heal`."""
    DIE = "die"
    """Immediate: RESTART and REFUSE."""
    TERMINATE = "terminate"
    """Immediate, as vLLM on SIGTERM: accept no connection; streams stay open and get no more tokens."""
    CORE_DIES = "core_dies"
    """Immediate: all streams end with an error event and `[DONE]`; health checks and requests fail until cleared."""
    THROTTLE = "throttle"
    """Immediate: every step takes `factor` times as long as configured."""
    SLOW_LINK = "slow_link"
    """Immediate: every transfer of KV from this engine takes `factor` times as long as configured."""
    DIE_BEFORE_ANSWER = "die_before_answer"
    """DIE when a prefill leg is computed and not yet answered."""
    LOAD_FAILS = "load_fails"
    """A decode leg fails to load its KV."""


ENGINE_FAULTS = (FaultKind.RESTART, FaultKind.REFUSE, FaultKind.DIE, FaultKind.TERMINATE, FaultKind.CORE_DIES)
"""Faults of an engine that can be armed for a token of a stream."""

STREAM_FAULTS = (FaultKind.CUT, FaultKind.SILENCE, FaultKind.ABORT, *ENGINE_FAULTS)
"""Faults that break a stream after `after_chunks` tokens."""

REQUEST_FAULTS = (FaultKind.STATUS, FaultKind.HANG, FaultKind.RESET, FaultKind.RAW, FaultKind.SLOW, *STREAM_FAULTS)
"""Faults of generation and embedding requests."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault. It occurs `count` times; None: until it is cleared."""

    kind: FaultKind
    count: int | None = 1
    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    message: str = "injected fault"
    after_chunks: int | None = None
    """None is 1; an immediate fault that has it waits for a stream with this many tokens."""
    pause_s: float = 0.05
    raw: str = ""
    """Bytes as Latin-1."""
    piece_bytes: int = 65536
    then: Literal["close", "reset", "hang"] = "close"
    for_s: float | None = None
    replayable: bool = True
    factor: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """The slowdown by THROTTLE or SLOW_LINK; 1 ends it."""


class FaultBoard:
    """Armed faults, oldest first."""

    def __init__(self) -> None:
        self._armed: list[tuple[Fault, int | None]] = []

    @property
    def armed(self) -> tuple[Fault, ...]:
        """Faults that have not yet occurred as often as their count."""
        return tuple(fault for fault, _ in self._armed)

    def arm(self, fault: Fault) -> None:
        self._armed.append((fault, fault.count))

    def clear(self) -> None:
        self._armed.clear()

    def take(self, *kinds: FaultKind) -> Fault | None:
        """Count one occurrence of the oldest armed fault of these kinds and return the fault; None if there is none."""
        for at, (fault, left) in enumerate(self._armed):
            if fault.kind in kinds:
                if left is not None and left <= 1:
                    del self._armed[at]
                elif left is not None:
                    self._armed[at] = (fault, left - 1)
                return fault
        return None
