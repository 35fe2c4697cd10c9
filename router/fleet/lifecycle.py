"""Which states may follow one another in a pod's life?

One table; every pair that is not in it changes nothing. The table is the rule, `as_text` its picture. This file holds
no pod and no counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from router.types import PodState


class PodEvent(StrEnum):
    """What can happen to a pod."""

    PROBE_OK = "probe_ok"
    EJECT = "eject"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    LOST = "lost"


TRANSITIONS: Mapping[tuple[PodState, PodEvent], PodState] = {
    (PodState.JOINING, PodEvent.PROBE_OK): PodState.READY,
    (PodState.JOINING, PodEvent.DRAIN): PodState.DRAINING,
    (PodState.JOINING, PodEvent.LOST): PodState.GONE,
    (PodState.READY, PodEvent.EJECT): PodState.EJECTED,
    (PodState.READY, PodEvent.DRAIN): PodState.DRAINING,
    (PodState.READY, PodEvent.LOST): PodState.GONE,
    (PodState.EJECTED, PodEvent.PROBE_OK): PodState.READY,
    (PodState.EJECTED, PodEvent.DRAIN): PodState.DRAINING,
    (PodState.EJECTED, PodEvent.LOST): PodState.GONE,
    # A drained pod proves itself anew before it gets traffic.
    (PodState.DRAINING, PodEvent.UNDRAIN): PodState.JOINING,
    (PodState.DRAINING, PodEvent.LOST): PodState.GONE,
}


def next_state(state: PodState, event: PodEvent) -> PodState:
    """The state after `event`; the same one where the table has no entry."""
    return TRANSITIONS.get((state, event), state)


def as_text() -> str:
    """The table, one transition a line, for people."""
    rows = (f"{state.value:9} --{event.value}--> {after.value}" for (state, event), after in TRANSITIONS.items())
    return "\n".join(rows)
