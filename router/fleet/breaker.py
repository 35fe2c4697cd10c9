"""When has a pod failed so often that it should get nothing more, and when may it be asked again?

Requests and probes are counted apart: a pod whose /health answers while every request fails is ejected, and a pod that
is too busy for its /health but finishes requests is not. Each ejection without a served request in between doubles the
time until the pod is probed again. A client that left is neither success nor failure, so nobody tells us of it.

A pod can also fail by being late: answers come, but their first tokens many times later than they were expected, one
after another, while most other pods are on time. Where they are not, it is the expectation that is wrong. Such a pod
passes every probe, so that its back-off is longer, and forgotten only when a first token is on time.

The workers of one router tell one another what they hold against a pod; who reaches a limit ejects it for all. This
file never probes and never reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.types import Pod, PodId, PodState

LEAST_EXPECTED_MS = 500.0
"""Less than this is not expected of anybody, where lateness counts: steps and networks have their moods."""
LATE_BACKOFF_FACTOR = 10.0
"""Between the back-off after being late and that after failing."""


@dataclass(slots=True)
class _Lateness:
    tokens: int = 0
    """First tokens that were late, one after another."""
    backoff_s: float = 0.0
    probe_at_s: float = 0.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    failed_probes: int = 0
    backoff_s: float = 0.0
    probe_at_s: float = 0.0


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is held against a pod, whoever probes it: failures and late first tokens, one after another, and until when
    it is not probed for either."""

    failures: int = 0
    backoff_s: float = 0.0
    probe_at_s: float = 0.0
    late_tokens: int = 0
    late_backoff_s: float = 0.0
    late_probe_at_s: float = 0.0


class Breaker:
    """Counts consecutive failures of READY pods and ejects them from `fleet` at the limit.

    Failures of a pod in any other state are those of requests that were under way, and count for nothing."""

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
        self._late: dict[PodId, _Lateness] = {}
        self.on_change: Callable[[PodId], None] | None = None
        """Called with the id of each pod whose failure or lateness record changed."""
        fleet.listen(self._forget_the_gone)

    def success(self, pod_id: PodId) -> None:
        """A request was served: whatever was held against the pod is settled."""
        if self._records.pop(pod_id, None) is not None:
            self._notify(pod_id)

    def failure(self, pod_id: PodId, now_s: float) -> None:
        """A request failed, and it was the pod's fault."""
        if self._is_ready(pod_id):
            record = self._record(pod_id)
            record.failures += 1
            self._eject_at_limit(pod_id, record, record.failures, now_s)
            self._notify(pod_id)

    def first_token(self, pod_id: PodId, expected_ms: float, actual_ms: float, now_s: float) -> None:
        """A first token came; `late_to_eject` 0: whenever it likes."""
        if actual_ms <= self._late_factor * max(expected_ms, LEAST_EXPECTED_MS):
            if self._late.pop(pod_id, None) is not None:
                self._notify(pod_id)
        elif self._is_ready(pod_id):
            late = self._late.setdefault(pod_id, _Lateness())
            late.tokens += 1
            if late.tokens >= self._late_to_eject > 0 and self._most_others_are_on_time(pod_id):
                late.tokens = 0
                least_s, most_s = self._first_backoff_s, self._max_backoff_s
                late.backoff_s = min(late.backoff_s * 2 or least_s * LATE_BACKOFF_FACTOR, most_s * LATE_BACKOFF_FACTOR)
                late.probe_at_s = now_s + late.backoff_s
                self._fleet.event(pod_id, PodEvent.EJECT)
            self._notify(pod_id)

    def probe_ok(self, pod_id: PodId) -> None:
        """The pod's health check passed. Says nothing about its requests."""
        if pod_id in self._records:
            self._records[pod_id].failed_probes = 0

    def probe_failed(self, pod_id: PodId, now_s: float) -> None:
        """The pod's health check failed or came too late."""
        if self._is_ready(pod_id):
            record = self._record(pod_id)
            record.failed_probes += 1
            self._eject_at_limit(pod_id, record, record.failed_probes, now_s)
            self._notify(pod_id)

    def may_probe(self, pod_id: PodId, now_s: float) -> bool:
        """False while an ejected pod's back-off runs."""
        waits = (self._records.get(pod_id), self._late.get(pod_id))
        return all(wait is None or now_s >= wait.probe_at_s for wait in waits)

    def held(self) -> Mapping[PodId, Held]:
        """Whatever is held against any pod."""
        return {pod: held for pod in {*self._records, *self._late} if (held := self.held_against(pod)) is not None}

    def held_against(self, pod_id: PodId) -> Held | None:
        """The same of one pod; None where that is nothing."""
        record, late = self._records.get(pod_id), self._late.get(pod_id)
        if record is None and late is None:
            return None
        record, late = record or _Record(), late or _Lateness()
        return Held(
            *(record.failures, record.backoff_s, record.probe_at_s),
            *(late.tokens, late.backoff_s, late.probe_at_s),
        )

    def apply_remote(self, pod_id: PodId, held: Held | None, now_s: float) -> None:
        """Replace the record of the pod with that of another worker. A new ejection there ejects the pod here."""
        if self._fleet.status(pod_id) is None:
            return
        if held is None:
            self._records.pop(pod_id, None)
            self._late.pop(pod_id, None)
            return
        waited_s = max(self._record(pod_id).probe_at_s, self._late.get(pod_id, _Lateness()).probe_at_s, now_s)
        record = self._record(pod_id)
        record.failures, record.backoff_s, record.probe_at_s = held.failures, held.backoff_s, held.probe_at_s
        if held.late_tokens or held.late_backoff_s:
            self._late[pod_id] = _Lateness(held.late_tokens, held.late_backoff_s, held.late_probe_at_s)
        else:
            self._late.pop(pod_id, None)
        if max(held.probe_at_s, held.late_probe_at_s) > waited_s:
            record.failed_probes = 0
            self._fleet.event(pod_id, PodEvent.EJECT)

    def _notify(self, pod_id: PodId) -> None:
        if self.on_change is not None:
            self.on_change(pod_id)

    def _most_others_are_on_time(self, pod_id: PodId) -> bool:
        """Of the pods that serve the same. O(pods), for a pod that is late again and again."""
        own = self._fleet.status(pod_id)
        pods = self._fleet.snapshot.pods
        others = [status for status in pods if own and status is not own and status.pod.models == own.pod.models]
        on_time = sum(other.state is PodState.READY and other.pod.id not in self._late for other in others)
        return on_time * 2 > len(others)

    def _eject_at_limit(self, pod_id: PodId, record: _Record, failures: int, now_s: float) -> None:
        if failures < self._failures_to_eject:
            return
        record.failures = record.failed_probes = 0
        record.backoff_s = min(record.backoff_s * 2 or self._first_backoff_s, self._max_backoff_s)
        record.probe_at_s = now_s + record.backoff_s
        self._fleet.event(pod_id, PodEvent.EJECT)

    def _is_ready(self, pod_id: PodId) -> bool:
        status = self._fleet.status(pod_id)
        return status is not None and status.state is PodState.READY

    def _record(self, pod_id: PodId) -> _Record:
        return self._records.setdefault(pod_id, _Record())

    def _forget_the_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._records.pop(pod.id, None)
            self._late.pop(pod.id, None)
