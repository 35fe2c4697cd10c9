"""The states of pods and their transitions, and the single owner of every pod's facts, state, load and trust.

One table from (state, event) to state; a pair that is not in the table changes nothing. READY is entered only through a
successful probe. A pod that is found again after GONE starts a new epoch. Readers get an immutable snapshot that is
rebuilt after a change, not per request. Updates of a pod that is gone are ignored, since answers may arrive late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import count
from math import inf
from typing import Any, TypeAlias

from router.types import FleetSnapshot, Links, Pod, PodId, PodLoad, PodSpeed, PodState, PodStatus, PrefixTrust

_NO_LINKS = Links()

Listener: TypeAlias = Callable[[Pod, PodState, PodState], None]
"""Called with (pod, old state, new state) after a change of state or epoch; the states are equal if only the epoch is
new."""

ServedName: TypeAlias = tuple[tuple[str, str], int | None]
"""(base model, adapter or ""), and the least `max_model_len_tokens` of the pods that serve it."""

ALIKE = 0.002
"""A smaller relative change of a speed creates no new snapshot."""


UNREPORTED: Mapping[str, Any] = {
    "models": (),
    "adapters": (),
    "max_model_len_tokens": None,
    "block_size_tokens": None,
    "capacity_tokens": None,
    "version": "",
    "front_end": "",
    "weights": "",
    "load_endpoint": "",
}
"""What pods report of themselves, and what is known before."""


_UNTESTED: Mapping[str, Any] = {
    "trust": PrefixTrust.UNTESTED,
    "converts": frozenset(),
    "reads_pictures": False,
    "misreads": frozenset(),
    "continues": frozenset(),
    "lacks": frozenset(),
    "keeps_answers": None,
    "is_asleep": False,
}
"""What tests show of a pod, before the first one of its life."""


NOT_READY = "not ready in Kubernetes"
"""Why a pod is drained that has caused it itself."""


class PodEvent(StrEnum):
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
    return TRANSITIONS.get((state, event), state)


class Fleet:
    """All pods and the links between them. Epochs come from one counter: one that is found again has a new one."""

    def __init__(self, links: Links = _NO_LINKS) -> None:
        self._links = links
        self._statuses: dict[PodId, PodStatus] = {}  # ordered by id
        self._configured: dict[PodId, Pod] = {}
        """The set of the last `sync`."""
        self._reasons: dict[PodId, str] = {}
        self._state_reasons: dict[PodId, str] = {}
        self._received_at_s: dict[PodId, float] = {}
        self._listeners: list[Listener] = []
        self._epochs = count(1)
        self._version = 0
        self._snapshot = FleetSnapshot(links=links)
        self._names: dict[str, ServedName] | None = None
        self._lacks: frozenset[str] | None = None

    @property
    def snapshot(self) -> FleetSnapshot:
        """All pods, ordered by id. The same object until something changes."""
        if self._snapshot.version != self._version:
            self._snapshot = FleetSnapshot(self._version, tuple(self._statuses.values()), self._links)
        return self._snapshot

    def status(self, pod_id: PodId) -> PodStatus | None:
        return self._statuses.get(pod_id)

    def same_epoch(self, pod: Pod) -> PodStatus | None:
        """The status of this pod now; None if it is gone or has restarted since."""
        status = self._statuses.get(pod.id)
        return status if status is not None and status.pod.epoch == pod.epoch else None

    def resolve(self, model: str) -> tuple[str, str] | None:
        """(base model, adapter or "") of a name that clients use; None if no pod serves it."""
        found = self.served.get(model)
        return found and found[0]

    @property
    def served(self) -> Mapping[str, ServedName]:
        """What pods serve, by the names that clients use."""
        if self._names is None:
            self._names = _served_names([status.pod for status in self._statuses.values()])
        return self._names

    @property
    def lacks(self) -> frozenset[str]:
        """What requests need and some pod lacks."""
        if self._lacks is None:
            self._lacks = frozenset().union(*(status.pod.lacks for status in self._statuses.values()))
        return self._lacks

    def trust_reason(self, pod_id: PodId) -> str:
        """The reason for the pod's trust; empty before its first parity test."""
        return self._reasons.get(pod_id, "")

    def state_reason(self, pod_id: PodId) -> str:
        """Why the pod is not READY, or why it still is; empty if the reason is unknown, or if there is none."""
        return self._state_reasons.get(pod_id, "")

    def is_leaving(self, pod_id: PodId) -> bool:
        """Whether the pod is drained, but not for a failure of its own."""
        known = self._statuses.get(pod_id)
        return known is not None and known.state is PodState.DRAINING and self.state_reason(pod_id) != NOT_READY

    def explain_state(self, pod_id: PodId, reason: str) -> None:
        """Record why a pod is in its state, until it changes or a probe succeeds."""
        if pod_id in self._statuses:
            self._state_reasons[pod_id] = reason

    def received(self, pod_id: PodId, now_s: float) -> None:
        """The pod has sent something that the ledger does not count: a part of an answer, its load, KV events."""
        if pod_id in self._statuses:
            self._received_at_s[pod_id] = now_s

    def received_at_s(self, pod_id: PodId) -> float:
        return self._received_at_s.get(pod_id, -inf)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` on every change. Returns a function that unregisters it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # --- membership ---------------------------------------------------------------------------------------

    def sync(self, pods: Iterable[Pod]) -> None:
        """Replace the set of pods. Pods that stay keep their state, load and learnt facts; an id with
        another url, uid, socket or engine is another process: the old pod is lost and the new one found."""
        wanted = {pod.id: pod for pod in pods}
        for known in self.snapshot.pods:
            pod = wanted.get(known.pod.id)
            if pod is None or _process(pod) != _process(known.pod):
                self.event(known.pod.id, PodEvent.LOST)
        new = [pod for pod in wanted.values() if pod.id not in self._statuses]
        for pod in wanted.values():
            status = self._statuses.get(pod.id)
            if status is not None and pod != self._configured.get(pod.id):
                self._put(replace(status, pod=_reconfigured(status.pod, pod)))
        self._add(new)
        self._configured = wanted

    def event(self, pod_id: PodId, event: PodEvent, now_s: float | None = None, reason: str = "") -> PodState:
        """Returns the state after it. `now_s` is recorded if the pod becomes READY, `reason` if its state changes."""
        known = self._statuses.get(pod_id)
        if known is None:
            return PodState.GONE
        state = transition(known.state, event)
        if state is not known.state or (state is PodState.READY and event is PodEvent.PROBE_OK):
            self._state_reasons.pop(pod_id, None)
            if reason:
                self._state_reasons[pod_id] = reason
        if state is PodState.GONE:
            self._remove(known)
        elif state is not known.state:
            pod = replace(known.pod, ready_since_s=now_s) if state is PodState.READY else known.pod
            self._put(replace(known, pod=pod, state=state))
            self._notify(pod, known.state, state)
        return state

    def restarted(self, pod_id: PodId) -> None:
        """The pod restarted under its id: new epoch, empty cache, untested. Its state stays."""
        known = self._statuses.get(pod_id)
        if known is not None:
            pod = self._new_life(known.pod)
            self._put(PodStatus(pod, known.state))
            self._notify(pod, known.state, known.state)

    # --- facts --------------------------------------------------------------------------------

    def describe(self, pod_id: PodId, **reported: Any) -> None:
        """Replace what the pod has reported about itself: what it does not report any more is unknown."""
        self.learn(pod_id, **{**UNREPORTED, **reported})

    def learn(self, pod_id: PodId, **facts: Any) -> None:
        """Replace facts that the pod has reported, or a test has shown: `adapters`, or those of `_UNTESTED`."""
        known = self._statuses.get(pod_id)
        if known is not None:
            self._put(replace(known, pod=replace(known.pod, **facts)))

    def observe_load(self, pod_id: PodId, load: PodLoad) -> None:
        """Replace the pod's load. O(1); the next snapshot costs one tuple of all pods."""
        known = self._statuses.get(pod_id)
        if known is not None:
            self._statuses[pod_id] = PodStatus(known.pod, known.state, load)
            self._version += 1

    def calibrate(self, speeds: Mapping[PodId, PodSpeed], links: Links) -> None:
        for pod_id, speed in speeds.items():
            known = self._statuses.get(pod_id)
            if known is not None and not _alike(known.pod.speed, speed):
                self._statuses[pod_id] = replace(known, pod=replace(known.pod, speed=speed))
                self._version += 1
        if links != self._links:
            self._links = links
            self._version += 1

    def trust(self, pod_id: PodId, trust: PrefixTrust, reason: str) -> None:
        if pod_id in self._statuses:
            self._reasons[pod_id] = reason
        self.learn(pod_id, trust=trust)

    # --- changes ----------------------------------------------------------------------------------------------

    def _add(self, pods: Iterable[Pod]) -> None:
        joining = transition(PodState.GONE, PodEvent.FOUND)
        born = [self._new_life(pod) for pod in pods]
        if not born:
            return
        self._statuses |= {pod.id: PodStatus(pod, joining) for pod in born}
        self._statuses = dict(sorted(self._statuses.items()))
        self._touch()
        for pod in born:
            self._notify(pod, PodState.GONE, joining)

    def _remove(self, known: PodStatus) -> None:
        del self._statuses[known.pod.id]
        self._reasons.pop(known.pod.id, None)
        self._received_at_s.pop(known.pod.id, None)
        self._touch()
        self._notify(known.pod, known.state, PodState.GONE)

    def _new_life(self, pod: Pod) -> Pod:
        self._reasons.pop(pod.id, None)
        return replace(pod, epoch=next(self._epochs), **_UNTESTED)

    def _put(self, status: PodStatus) -> None:
        if self._statuses.get(status.pod.id) != status:
            self._statuses[status.pod.id] = status
            self._touch()

    def _touch(self) -> None:
        self._version += 1
        self._names = self._lacks = None

    def _notify(self, pod: Pod, old: PodState, new: PodState) -> None:
        for listener in tuple(self._listeners):
            listener(pod, old, new)


def _process(pod: Pod) -> tuple[object, ...]:
    return pod.url, pod.uid, pod.socket, pod.engine, pod.bearer_file, pod.bearer_env, pod.tls


def _reconfigured(known: Pod, configured: Pod) -> Pod:
    facts: dict[str, Any] = {name: getattr(known, name) for name in (*UNREPORTED, *_UNTESTED)}
    return replace(configured, **facts, epoch=known.epoch, ready_since_s=known.ready_since_s)


def _served_names(pods: Sequence[Pod]) -> dict[str, ServedName]:
    """A base model's name wins over an adapter's, the first pod's over those of others."""
    names = {name: (name, "") for pod in pods for name in pod.models}
    for pod in pods:
        for adapter in pod.adapters:
            names.setdefault(adapter, (pod.base_model or adapter, adapter))
    by_length = sorted(pods, key=lambda pod: pod.max_model_len_tokens or inf, reverse=True)
    shortest = {name: pod.max_model_len_tokens for pod in by_length for name in pod.models + pod.adapters}
    return {name: (found, shortest[name]) for name, found in names.items()}


def _alike(one: PodSpeed, other: PodSpeed) -> bool:
    """Whether the difference is too small for a new snapshot."""
    return all(abs(a - b) <= ALIKE * abs(b) for a, b in zip(one.coefficients, other.coefficients, strict=True))
