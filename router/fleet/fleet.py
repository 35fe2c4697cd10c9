"""Which pods are there, and how do they feel?

The single owner of pods, their states, loads and trust. Everyone else reads one immutable snapshot, rebuilt only when
something changed. States and facts learnt from a pod survive a discovery that lists it again. This file asks no pod
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from router.fleet.lifecycle import PodEvent, next_state
from router.types import FleetSnapshot, Pod, PodId, PodLoad, PodState, PodStatus, PrefixTrust

Listener = Callable[[Pod, PodState, PodState], None]
"""Told (pod, state before, state after) once for each change."""

_FROM_DISCOVERY = ("url", "engine", "speed", "role", "dp_rank", "host", "rack", "zone")


class Fleet:
    """All pods, by id."""

    def __init__(self) -> None:
        self._statuses: dict[PodId, PodStatus] = {}
        self._trust_reasons: dict[PodId, str] = {}
        self._listeners: list[Listener] = []
        self._snapshot = FleetSnapshot()
        self._changed = False

    @property
    def snapshot(self) -> FleetSnapshot:
        """All pods now, ordered by id."""
        if self._changed:
            ordered = tuple(self._statuses[pod] for pod in sorted(self._statuses))
            self._snapshot = FleetSnapshot(self._snapshot.version + 1, ordered)
            self._changed = False
        return self._snapshot

    def listen(self, listener: Listener) -> None:
        """Be told of every change of state."""
        self._listeners.append(listener)

    def sync(self, pods: Iterable[Pod]) -> None:
        """Take over a complete set from discovery: new pods join, missing ones are gone."""
        wanted = {pod.id: pod for pod in pods}
        for gone in [pod for pod in self._statuses if pod not in wanted]:
            self.event(gone, PodEvent.LOST)
        for pod in wanted.values():
            known = self._statuses.get(pod.id)
            if known is None:
                self._put(PodStatus(pod, PodState.JOINING))
            else:
                told = {name: getattr(pod, name) for name in _FROM_DISCOVERY}
                self._put(replace(known, pod=replace(known.pod, **told)))

    def describe(self, pod: PodId, **facts: Any) -> None:
        """Take over what the pod said of itself: fields of `Pod` by name. Unknown pods are ignored."""
        status = self._statuses.get(pod)
        if status is not None:
            self._put(replace(status, pod=replace(status.pod, **facts)))

    def observe_load(self, pod: PodId, load: PodLoad) -> None:
        """Take over a fresh load. Unknown pods are ignored."""
        status = self._statuses.get(pod)
        if status is not None:
            self._put(replace(status, load=load))

    def trust(self, pod: PodId, trust: PrefixTrust, reason: str) -> None:
        """Take over the outcome of the parity self-test."""
        self._trust_reasons[pod] = reason
        self.describe(pod, trust=trust)

    def trust_reason(self, pod: PodId) -> str:
        """Why the pod is trusted or not, for people."""
        return self._trust_reasons.get(pod, "not tested yet")

    def event(self, pod: PodId, event: PodEvent) -> None:
        """Let something happen to a pod; the lifecycle's table says what follows."""
        status = self._statuses.get(pod)
        if status is None:
            return
        after = next_state(status.state, event)
        if after is status.state:
            return
        if after is PodState.GONE:
            del self._statuses[pod]
            self._trust_reasons.pop(pod, None)
            self._changed = True
        else:
            self._put(replace(status, state=after))
        for listener in self._listeners:
            listener(status.pod, status.state, after)

    def status(self, pod: PodId) -> PodStatus | None:
        """One pod, or None."""
        return self._statuses.get(pod)

    def resolve(self, model: str) -> tuple[str, str] | None:
        """(base model, adapter or "") of a name that clients use, or None where nobody serves it."""
        for status in self._statuses.values():
            if model in status.pod.models:
                return model, ""
        for status in self._statuses.values():
            if model in status.pod.adapters and status.pod.models:
                return status.pod.models[0], model
        return None

    def _put(self, status: PodStatus) -> None:
        if self._statuses.get(status.pod.id) != status:
            self._statuses[status.pod.id] = status
            self._changed = True
