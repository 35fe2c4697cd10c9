"""What goes wrong next, and how often?

The switches of a mock engine as values: armed by `POST /_fault` or in code, spent one by one where they strike. This
file never breaks anything itself.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Literal

import msgspec


class FaultKind(StrEnum):
    """What an engine can do wrong."""

    STATUS = "status"
    """Answer `status` with an error body."""
    HANG = "hang"
    """Accept the request and never answer."""
    RESET = "reset"
    """Reset the connection before any header."""
    CUT = "cut"
    """Close the connection after `after_chunks` tokens of a stream, or half-way through a unary body."""
    RAW = "raw"
    """Write `raw` to the connection instead of an answer, `piece_bytes` at a time, whatever it means, then `then`."""
    SLOW = "slow"
    """Wait `pause_s` before each piece of the answer."""
    UNHEALTHY = "unhealthy"
    """`GET /health` answers 503."""
    LOSE_EVENTS = "lose_events"
    """A batch of KV events takes its sequence number and is not published; `replayable` keeps it for replay."""
    RESTART = "restart"
    """At once: a new life. Connections drop, the cache is empty, the event sequence starts at 0."""
    REFUSE = "refuse"
    """At once: connections drop and no new one is accepted, for `for_s` seconds or until `heal`."""
    DIE = "die"
    """At once: RESTART and REFUSE in one."""
    EXPIRE = "expire"
    """At once: the lease of all KV that waits for a decode leg ends."""
    DIE_BEFORE_ANSWER = "die_before_answer"
    """A prefill leg is computed, then the engine dies, for `for_s` seconds or until `heal`."""
    DIE_AFTER_ANSWER = "die_after_answer"
    """A prefill leg is answered, then the engine dies, for `for_s` seconds or until `heal`."""
    NO_PARAMS = "no_params"
    """A prefill leg is answered as if it were no such thing, and keeps nothing."""
    LOAD_FAILS = "load_fails"
    """A decode leg does not get its KV."""


REQUEST_FAULTS = frozenset(
    {FaultKind.STATUS, FaultKind.HANG, FaultKind.RESET, FaultKind.CUT, FaultKind.RAW, FaultKind.SLOW}
)
"""Those that strike the next generation or embedding requests; health and metrics go on as if nothing were."""

PREFILL_FAULTS = frozenset({FaultKind.DIE_BEFORE_ANSWER, FaultKind.DIE_AFTER_ANSWER, FaultKind.NO_PARAMS})
"""Those that strike the next prefill legs."""
DECODE_FAULTS = frozenset({FaultKind.LOAD_FAILS})
"""Those that strike the next decode legs."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One armed switch. `count` is how often it strikes, None until cleared."""

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
    """The armed faults, in the order in which they were armed."""

    def __init__(self) -> None:
        self._armed: list[tuple[Fault, int | None]] = []

    @property
    def armed(self) -> tuple[Fault, ...]:
        """What is still to strike."""
        return tuple(fault for fault, _ in self._armed)

    def arm(self, fault: Fault) -> None:
        """Let `fault` strike `fault.count` times."""
        self._armed.append((fault, fault.count))

    def clear(self) -> None:
        """Disarm everything."""
        self._armed.clear()

    def strike(self, kinds: frozenset[FaultKind]) -> Fault | None:
        """The oldest armed fault of these kinds, spent once; None where all is well."""
        for at, (fault, left) in enumerate(self._armed):
            if fault.kind in kinds:
                if left is not None and left <= 1:
                    del self._armed[at]
                elif left is not None:
                    self._armed[at] = (fault, left - 1)
                return fault
        return None
