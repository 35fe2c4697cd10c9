"""The states of a pod and their transitions.

One table from (state, event) to state; a pair that is not in the table changes nothing. READY is entered only through a
successful probe. A pod that is found again after GONE starts a new epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from router.types import PodState


class PodEvent(StrEnum):
    """An event in a pod's life."""

    FOUND = "found"
    LOST = "lost"
    PROBE_OK = "probe ok"
    EJECT = "eject"
    DRAIN = "drain"
    UNDRAIN = "undrain"


TRANSITIONS: Mapping[tuple[PodState, PodEvent], PodState] = {
    (PodState.GONE, PodEvent.FOUND): PodState.JOINING,
    (PodState.JOINING, PodEvent.PROBE_OK): PodState.READY,
    (PodState.JOINING, PodEvent.DRAIN): PodState.DRAINING,
    (PodState.JOINING, PodEvent.LOST): PodState.GONE,
    (PodState.READY, PodEvent.EJECT): PodState.EJECTED,
    (PodState.READY, PodEvent.DRAIN): PodState.DRAINING,
    (PodState.READY, PodEvent.LOST): PodState.GONE,
    (PodState.EJECTED, PodEvent.PROBE_OK): PodState.READY,
    (PodState.EJECTED, PodEvent.DRAIN): PodState.DRAINING,
    (PodState.EJECTED, PodEvent.LOST): PodState.GONE,
    (PodState.DRAINING, PodEvent.UNDRAIN): PodState.JOINING,
    (PodState.DRAINING, PodEvent.LOST): PodState.GONE,
}


def transition(state: PodState, event: PodEvent) -> PodState:
    """The state after `event`."""
    return TRANSITIONS.get((state, event), state)
