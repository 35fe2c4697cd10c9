"""Logs the changes of pods, one line each."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from router.fleet.fleet import Fleet, Listener
from router.types import Pod, PodState

_REASONS: Mapping[PodState, str] = {
    PodState.JOINING: "undrained",
    PodState.READY: "health check passed",
    PodState.DRAINING: "admin call",
    PodState.GONE: "removed, or no longer listed",
}
"""Reasons of changes for which the fleet records none."""

log = structlog.get_logger()


def log_changes(fleet: Fleet) -> Listener:
    """A listener of the fleet. An ejection is a warning, other changes are info."""

    def on_change(pod: Pod, old: PodState, new: PodState) -> None:
        if old is new:
            log.info("pod restarted; its cache is empty", pod=pod.id, epoch=pod.epoch)
            return
        reason = "found" if old is PodState.GONE else fleet.state_reason(pod.id) or _REASONS.get(new, "")
        write = log.warning if new is PodState.EJECTED else log.info
        write("pod state changed", pod=pod.id, old=old.value, new=new.value, reason=reason)

    return on_change
