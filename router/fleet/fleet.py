"""Which pods are there, and how do they feel?

The single owner of every pod's facts, state, load and trust. Readers get an immutable snapshot that is rebuilt when
something has changed and never per request. What is said of a pod that has gone meanwhile is dropped in silence, since
answers may arrive late. This file never talks to a pod and never reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from router.fleet.lifecycle import PodEvent, transition
from router.types import FleetSnapshot, Links, Pod, PodId, PodLoad, PodSpeed, PodState, PodStatus, PrefixTrust

_NO_LINKS = Links()

Listener: TypeAlias = Callable[[Pod, PodState, PodState], None]
"""Told (pod, old state, new state) after a change of state or of epoch; the states are equal when only the epoch is
new."""

ALIKE = 0.002
"""Speeds that differ by a smaller share make no new snapshot, and no new line of it where receipts are written."""


class Fleet:
    """All pods of this router, and the ways between them. Epochs come from one counter, so that no two lives share one,
    even under one id."""

    def __init__(self, links: Links = _NO_LINKS) -> None:
        self._links = links
        self._statuses: dict[PodId, PodStatus] = {}  # ordered by id
        self._configured: dict[PodId, Pod] = {}
        """The set of the last `sync`."""
        self._reasons: dict[PodId, str] = {}
        self._listeners: list[Listener] = []
        self._epochs = count(1)
        self._version = 0
        self._snapshot = FleetSnapshot(links=links)
        self._names: dict[str, tuple[str, str]] | None = None

    @property
    def snapshot(self) -> FleetSnapshot:
        """All pods at this moment, ordered by id. The same object until something changes."""
        if self._snapshot.version != self._version:
            self._snapshot = FleetSnapshot(self._version, tuple(self._statuses.values()), self._links)
        return self._snapshot

    def status(self, pod_id: PodId) -> PodStatus | None:
        """One pod at this moment; None if it is not there."""
        return self._statuses.get(pod_id)

    def resolve(self, model: str) -> tuple[str, str] | None:
        """(base model, adapter or "") of a name that clients use; None where no pod has it."""
        if self._names is None:
            self._names = _served_names([status.pod for status in self._statuses.values()])
        return self._names.get(model)

    def trust_reason(self, pod_id: PodId) -> str:
        """Why the pod is trusted as it is; empty before its first test."""
        return self._reasons.get(pod_id, "")

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of every change from now on. Returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # --- who is there ---------------------------------------------------------------------------------------

    def sync(self, pods: Iterable[Pod]) -> None:
        """Take the complete set that discovery sees. Pods that stay keep their state, load and learnt facts; an id
        that now names another process (url, socket or engine differ) is lost and found anew."""
        wanted = {pod.id: pod for pod in pods}
        for known in self.snapshot.pods:
            pod = wanted.get(known.pod.id)
            if pod is None or _process(pod) != _process(known.pod):
                self.event(known.pod.id, PodEvent.LOST)
        for pod in wanted.values():
            status = self._statuses.get(pod.id)
            if status is None:
                self._add(pod)
            elif pod != self._configured.get(pod.id):
                self._put(replace(status, pod=_reconfigured(status.pod, pod)))
        self._configured = wanted

    def event(self, pod_id: PodId, event: PodEvent, now_s: float | None = None) -> PodState:
        """Let `event` happen to a pod. Returns its state afterwards. `now_s` tells since when it is READY, if it is."""
        known = self._statuses.get(pod_id)
        if known is None:
            return PodState.GONE
        state = transition(known.state, event)
        if state is PodState.GONE:
            self._remove(known)
        elif state is not known.state:
            pod = replace(known.pod, ready_since_s=now_s) if state is PodState.READY else known.pod
            self._put(replace(known, pod=pod, state=state))
            self._tell(pod, known.state, state)
        return state

    def restarted(self, pod_id: PodId) -> None:
        """A new life under the same id: a new epoch, an empty cache, nothing proven. It may go on serving."""
        known = self._statuses.get(pod_id)
        if known is not None:
            pod = self._new_life(known.pod)
            self._put(PodStatus(pod, known.state))
            self._tell(pod, known.state, known.state)

    # --- what is known of them --------------------------------------------------------------------------------

    def describe(
        self,
        pod_id: PodId,
        *,
        models: tuple[str, ...],
        adapters: tuple[str, ...] = (),
        max_model_len_tokens: int | None = None,
        block_size_tokens: int | None = None,
        capacity_blocks: int | None = None,
        version: str = "",
    ) -> None:
        """What the pod said of itself; replaces what it said before."""
        known = self._statuses.get(pod_id)
        if known is not None:
            pod = replace(
                known.pod,
                models=models,
                adapters=adapters,
                max_model_len_tokens=max_model_len_tokens,
                block_size_tokens=block_size_tokens,
                capacity_blocks=capacity_blocks,
                version=version,
            )
            self._put(replace(known, pod=pod))

    def observe_load(self, pod_id: PodId, load: PodLoad) -> None:
        """The pod's latest load. O(1); the next reader of the snapshot pays one tuple of all pods."""
        known = self._statuses.get(pod_id)
        if known is not None:
            self._statuses[pod_id] = PodStatus(known.pod, known.state, load)
            self._version += 1

    def calibrate(self, speeds: Mapping[PodId, PodSpeed], links: Links) -> None:
        """What has been learnt of speeds and links; what is not named stays as it was."""
        for pod_id, speed in speeds.items():
            known = self._statuses.get(pod_id)
            if known is not None and not _alike(known.pod.speed, speed):
                self._statuses[pod_id] = replace(known, pod=replace(known.pod, speed=speed))
                self._version += 1
        if links != self._links:
            self._links = links
            self._version += 1

    def trust(self, pod_id: PodId, trust: PrefixTrust, reason: str) -> None:
        """The outcome of the pod's parity self-test."""
        known = self._statuses.get(pod_id)
        if known is not None:
            self._reasons[pod_id] = reason
            self._put(replace(known, pod=replace(known.pod, trust=trust)))

    # --- changes ----------------------------------------------------------------------------------------------

    def _add(self, pod: Pod) -> None:
        born = self._new_life(pod)
        joining = transition(PodState.GONE, PodEvent.FOUND)
        self._put(PodStatus(born, joining))
        self._statuses = dict(sorted(self._statuses.items()))
        self._tell(born, PodState.GONE, joining)

    def _remove(self, known: PodStatus) -> None:
        del self._statuses[known.pod.id]
        self._reasons.pop(known.pod.id, None)
        self._touch()
        self._tell(known.pod, known.state, PodState.GONE)

    def _new_life(self, pod: Pod) -> Pod:
        self._reasons.pop(pod.id, None)
        return replace(pod, epoch=next(self._epochs), trust=PrefixTrust.UNTESTED)

    def _put(self, status: PodStatus) -> None:
        if self._statuses.get(status.pod.id) != status:
            self._statuses[status.pod.id] = status
            self._touch()

    def _touch(self) -> None:
        self._version += 1
        self._names = None

    def _tell(self, pod: Pod, old: PodState, new: PodState) -> None:
        for listener in tuple(self._listeners):
            listener(pod, old, new)


def _process(pod: Pod) -> tuple[str, str, str]:
    """What makes it another one where it differs."""
    return pod.url, pod.socket, pod.engine


def _reconfigured(known: Pod, configured: Pod) -> Pod:
    """What discovery says now, with what the pod itself has told and proven."""
    return replace(
        configured,
        models=known.models,
        adapters=known.adapters,
        max_model_len_tokens=known.max_model_len_tokens,
        block_size_tokens=known.block_size_tokens,
        capacity_blocks=known.capacity_blocks,
        version=known.version,
        epoch=known.epoch,
        trust=known.trust,
        ready_since_s=known.ready_since_s,
    )


def _served_names(pods: Iterable[Pod]) -> dict[str, tuple[str, str]]:
    """Every served name with its meaning. A base model's name wins over an adapter's."""
    pods = tuple(pods)
    names = {model: (model, "") for pod in pods for model in pod.models}
    for pod in pods:
        for adapter in pod.adapters:
            names.setdefault(adapter, (pod.models[0] if pod.models else adapter, adapter))
    return names


def _alike(one: PodSpeed, other: PodSpeed) -> bool:
    """Too near one another to make a new snapshot for."""
    return all(abs(a - b) <= ALIKE * abs(b) for a, b in zip(one.coefficients, other.coefficients, strict=True))
