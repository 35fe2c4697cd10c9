"""Decides when a failing pod is ejected and when it may be probed again.

Failures of requests and of probes are counted separately: a pod that answers /health while every request fails is
ejected, and a pod that is too busy for /health but finishes requests is not. Each ejection without a served request in
between doubles the backoff until the next probe. A request aborted by its client counts neither as a failure nor as
a success.

A pod can also fail by being late: several first tokens in a row come many times later than expected, while most other
pods are on time. If those are late as well, the expectation is wrong. A late pod passes every probe, so its backoff is
longer and is reset only by a first token that is on time.

The workers of one router share these records; an ejection by one worker ejects the pod in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from router.fleet.fleet import Fleet, PodEvent
from router.types import Pod, PodId, PodState

MIN_EXPECTED_MS = 500.0
"""Minimum expected time to first token in the lateness check: steps and networks vary."""
LATE_BACKOFF_FACTOR = 10.0
"""Backoff after lateness relative to that after failures."""


@dataclass(slots=True)
class _Record:
    """Failures or late first tokens of a pod in a row (`failures`), and its backoff."""

    failures: int = 0
    failed_probes: int = 0
    backoff_s: float = 0.0
    probe_at_s: float = 0.0


class FailureRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Failures and late first tokens of a pod in a row, and until when it is not probed; shared between workers."""

    failures: int = 0
    backoff_s: float = 0.0
    probe_at_s: float = 0.0
    late_tokens: int = 0
    late_backoff_s: float = 0.0
    late_probe_at_s: float = 0.0


class Breaker:
    """Counts consecutive failures of READY pods and ejects them from `fleet` at the limit.

    Failures of a pod in another state belong to requests sent earlier and do not count."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        failures_to_eject: int = 3,
        first_backoff_s: float = 1.0,
        max_backoff_s: float = 30.0,
        late_factor: float = 10.0,
        late_to_eject: int = 8,
    ) -> None:
        self._fleet = fleet
        self._failures_to_eject = failures_to_eject
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self._late_factor = late_factor
        self._late_to_eject = late_to_eject
        self._records: dict[PodId, _Record] = {}
        self._late: dict[PodId, _Record] = {}
        self.on_change: Callable[[PodId], None] | None = None
        """Called with the id of each pod whose failure or lateness record changed."""
        fleet.listen(self._remove_gone)

    def success(self, pod_id: PodId) -> None:
        """A request was served: reset the pod's failures."""
        if self._records.pop(pod_id, None) is not None:
            self._notify(pod_id)

    def failure(self, pod_id: PodId, now_s: float) -> None:
        """A request failed because of the pod."""
        if self._is_ready(pod_id):
            record = self._record(pod_id)
            record.failures += 1
            self._eject_at_limit(pod_id, record, record.failures, now_s)
            self._notify(pod_id)

    def first_token(self, pod_id: PodId, expected_ms: float, actual_ms: float, now_s: float) -> None:
        """A first token arrived. With `late_to_eject` 0 lateness never ejects."""
        if actual_ms <= self._late_factor * max(expected_ms, MIN_EXPECTED_MS):
            if self._late.pop(pod_id, None) is not None:
                self._notify(pod_id)
        elif self._is_ready(pod_id):
            late = self._late.setdefault(pod_id, _Record())
            late.failures += 1
            if late.failures >= self._late_to_eject > 0 and self._most_others_on_time(pod_id):
                self._eject(pod_id, late, now_s, LATE_BACKOFF_FACTOR)
            self._notify(pod_id)

    def probe_ok(self, pod_id: PodId) -> None:
        """The pod's health check passed. Failures of requests stay counted."""
        if pod_id in self._records:
            self._records[pod_id].failed_probes = 0

    def probe_failed(self, pod_id: PodId, now_s: float) -> None:
        """The pod's health check failed or timed out."""
        if self._is_ready(pod_id):
            record = self._record(pod_id)
            record.failed_probes += 1
            self._eject_at_limit(pod_id, record, record.failed_probes, now_s)
            self._notify(pod_id)

    def may_probe(self, pod_id: PodId, now_s: float) -> bool:
        """False during an ejected pod's backoff."""
        waits = (self._records.get(pod_id), self._late.get(pod_id))
        return all(wait is None or now_s >= wait.probe_at_s for wait in waits)

    def records(self) -> Mapping[PodId, FailureRecord]:
        """The records of all pods that have one."""
        return {pod: record for pod in {*self._records, *self._late} if (record := self.record_of(pod)) is not None}

    def record_of(self, pod_id: PodId) -> FailureRecord | None:
        """The record of one pod; None without failures and lateness."""
        record, late = self._records.get(pod_id), self._late.get(pod_id)
        if record is None and late is None:
            return None
        record, late = record or _Record(), late or _Record()
        return FailureRecord(
            failures=record.failures,
            backoff_s=record.backoff_s,
            probe_at_s=record.probe_at_s,
            late_tokens=late.failures,
            late_backoff_s=late.backoff_s,
            late_probe_at_s=late.probe_at_s,
        )

    def apply_remote(self, pod_id: PodId, remote: FailureRecord | None, now_s: float) -> None:
        """Replace the record of the pod with that of another worker. A new ejection there ejects the pod here."""
        if self._fleet.status(pod_id) is None:
            return
        if remote is None:
            self._records.pop(pod_id, None)
            self._late.pop(pod_id, None)
            return
        waited_s = max(self._record(pod_id).probe_at_s, self._late.get(pod_id, _Record()).probe_at_s, now_s)
        record = self._record(pod_id)
        record.failures, record.backoff_s, record.probe_at_s = remote.failures, remote.backoff_s, remote.probe_at_s
        if remote.late_tokens or remote.late_backoff_s:
            self._late[pod_id] = _Record(remote.late_tokens, 0, remote.late_backoff_s, remote.late_probe_at_s)
        else:
            self._late.pop(pod_id, None)
        if max(remote.probe_at_s, remote.late_probe_at_s) > waited_s:
            record.failed_probes = 0
            self._fleet.event(pod_id, PodEvent.EJECT)

    def _notify(self, pod_id: PodId) -> None:
        if self.on_change is not None:
            self.on_change(pod_id)

    def _most_others_on_time(self, pod_id: PodId) -> bool:
        """Whether most other pods of the same models are on time. O(pods); called only for a late pod."""
        own = self._fleet.status(pod_id)
        pods = self._fleet.snapshot.pods
        others = [status for status in pods if own and status is not own and status.pod.models == own.pod.models]
        on_time = sum(other.state is PodState.READY and other.pod.id not in self._late for other in others)
        return on_time * 2 > len(others)

    def _eject_at_limit(self, pod_id: PodId, record: _Record, failures: int, now_s: float) -> None:
        if failures >= self._failures_to_eject:
            self._eject(pod_id, record, now_s)

    def _eject(self, pod_id: PodId, record: _Record, now_s: float, factor: float = 1.0) -> None:
        """Eject the pod with twice the backoff of the last time."""
        record.failures = record.failed_probes = 0
        record.backoff_s = min(record.backoff_s * 2 or self._first_backoff_s * factor, self._max_backoff_s * factor)
        record.probe_at_s = now_s + record.backoff_s
        self._fleet.event(pod_id, PodEvent.EJECT)

    def _is_ready(self, pod_id: PodId) -> bool:
        status = self._fleet.status(pod_id)
        return status is not None and status.state is PodState.READY

    def _record(self, pod_id: PodId) -> _Record:
        return self._records.setdefault(pod_id, _Record())

    def _remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._records.pop(pod.id, None)
            self._late.pop(pod.id, None)
