"""Has this pod failed so often in a row that it should get no more requests?

Counts consecutive failures of requests and probes alike; a success forgets them, a client that left is neither. After
an ejection, readmission waits: 1 s, then twice as long each time it is ejected again, up to a limit. Every method that
needs the time takes it. This file never changes a pod's state; `fleet.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.types import PodId

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    ejections: int = 0
    readmit_at_s: float = 0.0


class Breaker:
    """Consecutive failures by pod."""

    def __init__(self, failures_to_eject: int = 3) -> None:
        self._failures_to_eject = failures_to_eject
        self._records: dict[PodId, _Record] = {}

    def failure(self, pod: PodId, now_s: float) -> bool:
        """Count one failure. True when it is the one that ejects."""
        record = self._records.setdefault(pod, _Record())
        record.failures += 1
        if record.failures != self._failures_to_eject:
            return False
        record.readmit_at_s = now_s + min(FIRST_WAIT_S * 2**record.ejections, LONGEST_WAIT_S)
        record.ejections += 1
        return True

    def success(self, pod: PodId) -> None:
        """A request was served: nothing is held against the pod any more."""
        self._records.pop(pod, None)

    def may_readmit(self, pod: PodId, now_s: float) -> bool:
        """May a successful probe bring the pod back already?"""
        record = self._records.get(pod)
        return record is None or now_s >= record.readmit_at_s

    def readmitted(self, pod: PodId) -> None:
        """The pod gets requests again; its next ejection still waits longer, until a request succeeds."""
        record = self._records.get(pod)
        if record is not None:
            record.failures = 0

    def forget(self, pod: PodId) -> None:
        """The pod is gone."""
        self._records.pop(pod, None)
