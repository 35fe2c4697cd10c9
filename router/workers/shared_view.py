"""Keeps the state that all workers of a router share.

    work         in-flight sums of each worker, by pod; dropped when the worker is gone
    failures     failures and lateness recorded against a pod; an ejection by one worker ejects the pod in all
    dispatched   blocks of each dispatched prompt, for the predicted index and the lineage of prompts; and whether its
                 pod has computed it
    reports      observed speeds of pods and links
    loads        scraped loads; the workers take turns, so that a pod is scraped no more often than by one process
    commands     pods that admin calls added, removed or drained
    responses    the pod of each stored response, for its follow-ups

Of work, failures and commands only the latest value counts, so a snapshot repairs all missed updates. Changes are
collected for `FLUSH_INTERVAL_S` and sent as one update by `bus.py`. Each worker follows KV events, probes and policy
files itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, nextafter
from typing import Annotated

import msgspec

from router.fleet.breaker import Breaker, FailureRecord
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.hashing import hash_array
from router.index.predicted import Prediction
from router.index.stored_responses import StoredResponse, StoredResponses
from router.policy.calibrator import Calibrator, PrefillReport, SpeedReport
from router.policy.classes import Classes
from router.stores.prefix_store import LocalStore
from router.types import InFlight, Pod, PodId, PodLoad, PodState

MAX_RECENT_BYTES = 1 << 20
"""Block hashes of recent dispatches: about a thousand prompts of 2K tokens. Well below `bus.MAX_UNSENT_BYTES`."""
MAX_SENT_RESPONSES = 8192
"""Stored responses in a snapshot: about 1 MB."""
FLUSH_INTERVAL_S = 0.001
"""Shortest time between two updates of one worker."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """A prompt was sent to a pod. `number` is unique in its worker; `blocks` are 64-bit hashes in the byte order of
    this machine."""

    number: int
    pod: PodId
    blocks: bytes
    ttl_s: float
    capacity_blocks: Annotated[int, msgspec.Meta(ge=0)] | None


class AdminCommand(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The state that an admin call asked for, and when. Of two commands on one subject the later one wins."""

    at_s: float
    wanted: str


class WorkerUpdate(msgspec.Struct, omit_defaults=True):
    """State of one worker that changed. A `snapshot` replaces all in-flight work and all dispatches without an outcome
    that the worker reported before."""

    snapshot: bool = False
    work: dict[PodId, InFlight | None] = {}
    failures: dict[PodId, FailureRecord | None] = {}
    dispatched: list[Dispatch] = []
    confirmed: list[int] = []
    """Numbers of dispatches, of this or an earlier update, whose prompt the pod has computed."""
    withdrawn: list[int] = []
    """Numbers of those whose prompt it has not computed."""
    reports: list[SpeedReport] = []
    loads: dict[PodId, PodLoad] = {}
    commands: dict[str, AdminCommand] = {}
    responses: list[StoredResponse] = []
    calibration: bytes = b""
    ready_pods: list[PodId] = []


class RecentDispatches:
    """The last dispatches of this worker, oldest first, up to a total size, each with the time of its confirmation."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[float | None, Dispatch]] = {}
        self._bytes = 0

    def add(self, dispatch: Dispatch) -> None:
        """Append one; evicts the oldest above `MAX_RECENT_BYTES`."""
        self._sent[dispatch.number] = None, dispatch
        self._bytes += len(dispatch.blocks)
        while self._bytes > MAX_RECENT_BYTES:
            self.remove(next(iter(self._sent)))

    def confirm(self, number: int, now_s: float) -> None:
        if number in self._sent:
            self._sent[number] = now_s, self._sent[number][1]

    def remove(self, number: int) -> None:
        sent = self._sent.pop(number, None)
        if sent is not None:
            self._bytes -= len(sent[1].blocks)

    def forget(self, pod: PodId) -> None:
        """Drop the dispatches to a pod whose cache is gone. O(dispatches)."""
        for number in [number for number, (_, dispatch) in self._sent.items() if dispatch.pod == pod]:
            self.remove(number)

    def unexpired(self, now_s: float) -> tuple[list[Dispatch], list[int]]:
        """The dispatches without an outcome and those that are confirmed and not expired; the numbers of the latter."""
        rows = [row for row in self._sent.values() if row[0] is None or row[0] + row[1].ttl_s > now_s]
        confirmed = [dispatch.number for at_s, dispatch in rows if at_s is not None]
        return [dispatch for _, dispatch in rows], confirmed


@dataclass(frozen=True, slots=True)
class SharedOwners:
    fleet: Fleet
    ledger: Ledger
    breaker: Breaker
    local: LocalStore
    calibrator: Calibrator
    classes: Classes
    responses: StoredResponses


class SharedView:
    """One worker's view of the shared state. `publish` sends an update to all other workers; `call_later(seconds,
    callback)` is the event loop's; `apply_command(subject, wanted)` applies an admin command of another worker."""

    def __init__(
        self,
        owners: SharedOwners,
        apply_command: Callable[[str, str], None],
        publish: Callable[[bytes], None],
        call_later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owners = owners
        self._apply_command = apply_command
        self._publish = publish
        self._call_later = call_later
        self._clock = clock
        self._flush_scheduled = False
        self._flushed_s = 0.0
        self._update = WorkerUpdate()
        self._changed_work: set[PodId] = set()
        self._changed_failures: set[PodId] = set()
        self._recent = RecentDispatches()
        self._pending: dict[int, dict[int, Prediction]] = {}
        """By worker and number, the dispatches of other workers without an outcome."""
        self._early: list[tuple[int, WorkerUpdate]] | None = []
        """Updates received before `begin`. Their dispatches are recorded later: adding a pod clears its records."""
        self._commands: dict[str, AdminCommand] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(WorkerUpdate).decode
        self.remote_ready_pods: set[PodId] = set()
        """Pods that were ready at another worker when it sent its snapshot."""
        owners.fleet.listen(self._forget_lost_cache)
        owners.ledger.on_change = self._on_work
        owners.breaker.on_change = self._on_failures
        owners.local.on_dispatch = self._on_dispatch
        owners.local.on_outcome = self._on_outcome
        owners.calibrator.on_report = self._on_report
        owners.responses.on_learn.append(self._on_response)

    # --- local changes ---

    def snapshot(self) -> bytes:
        """The state of this worker that a new worker needs."""
        owners, pods = self._owners, self._owners.fleet.snapshot.pods
        dispatched, confirmed = self._recent.unexpired(self._clock())
        return self._encode(
            WorkerUpdate(
                snapshot=True,
                work=dict(owners.ledger.own()),
                failures=dict(owners.breaker.records()),
                dispatched=dispatched,
                confirmed=confirmed,
                loads={status.pod.id: status.load for status in pods},
                commands=self._commands,
                responses=owners.responses.latest(MAX_SENT_RESPONSES),
                calibration=owners.calibrator.calibration.dump(),
                ready_pods=[status.pod.id for status in pods if status.state is PodState.READY],
            )
        )

    def add_load(self, pod: PodId, load: PodLoad) -> None:
        self._update.loads[pod] = load
        self._schedule_flush()

    def add_command(self, subject: str, wanted: str) -> None:
        """Share an admin command that this worker received, at once: its answer means that all workers have it."""
        known = self._commands.get(subject)
        at_s = max(self._clock(), nextafter(known.at_s, inf)) if known else self._clock()
        self._commands[subject] = self._update.commands[subject] = AdminCommand(at_s, wanted)
        self.flush()

    def command(self, subject: str) -> str:
        """The latest command on a subject at any worker; empty if there is none."""
        known = self._commands.get(subject)
        return known.wanted if known else ""

    def flush(self) -> None:
        update, self._update = self._update, WorkerUpdate()
        ledger, breaker = self._owners.ledger, self._owners.breaker
        update.work = {pod: ledger.own_on(pod) for pod in self._changed_work}
        update.failures = {pod: breaker.record_of(pod) for pod in self._changed_failures}
        self._changed_work.clear()
        self._changed_failures.clear()
        self._flush_scheduled, self._flushed_s = False, self._clock()
        self._publish(self._encode(update))

    def _on_work(self, pod: PodId) -> None:
        self._changed_work.add(pod)
        self._schedule_flush()

    def _on_failures(self, pod: PodId) -> None:
        self._changed_failures.add(pod)
        self._schedule_flush()

    def _on_dispatch(self, sent: Prediction) -> None:
        blocks = hash_array(sent.hashes).tobytes()
        dispatch = Dispatch(sent.number, sent.pod, blocks, sent.ttl_s, sent.capacity_blocks)
        self._recent.add(dispatch)
        self._update.dispatched.append(dispatch)
        self._schedule_flush()

    def _on_outcome(self, sent: Prediction, confirmed: bool) -> None:
        if confirmed:
            self._recent.confirm(sent.number, self._clock())
            self._update.confirmed.append(sent.number)
        else:
            self._recent.remove(sent.number)
            self._update.withdrawn.append(sent.number)
        self._schedule_flush()

    def _on_report(self, report: SpeedReport) -> None:
        self._update.reports.append(report)
        self._schedule_flush()

    def _on_response(self, stored: StoredResponse) -> None:
        self._update.responses.append(stored)
        self._schedule_flush()

    def _forget_lost_cache(self, pod: Pod, old: PodState, new: PodState) -> None:
        if new is old or new is PodState.GONE:
            self._recent.forget(pod.id)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._call_later(max(0.0, self._flushed_s + FLUSH_INTERVAL_S - self._clock()), self.flush)

    # --- changes of other workers ---

    def begin(self) -> None:
        """Record the dispatches received so far. Call once the fleet contains the pods."""
        early, self._early = self._early or (), None
        for worker, update in early:
            self._apply_dispatches(worker, update)

    def apply_remote(self, worker: int, message: bytes) -> None:
        """Apply a snapshot or an update of another worker. Raises `ValueError` if it is malformed."""
        update, owners, now_s = self._decode(message), self._owners, self._clock()
        if update.snapshot:
            owners.ledger.remove_worker(worker, now_s)
            self.remote_ready_pods.update(update.ready_pods)
            owners.calibrator.calibration.load(update.calibration)
        self._apply_work(worker, update.work)
        for pod, record in update.failures.items():
            owners.breaker.apply_remote(pod, record, now_s)
        self._apply_dispatches(worker, update)
        for stored in update.responses:
            owners.responses.learn(stored, now_s, remote=True)
        for report in update.reports:
            self._apply_report(report)
        for pod, load in update.loads.items():
            known = owners.fleet.status(pod)
            if known is not None and known.load.scraped_at_s < load.scraped_at_s:
                owners.fleet.observe_load(pod, load)
        for subject, command in update.commands.items():
            latest = self._commands.get(subject)
            if latest is None or command > latest:
                self._commands[subject] = command
                self._apply_command(subject, command.wanted)

    def remove_worker(self, worker: int) -> None:
        """Drop the in-flight work of a worker that is gone."""
        self._owners.ledger.remove_worker(worker, self._clock())
        self._withdraw_all(worker)

    def _apply_work(self, worker: int, rows: Mapping[PodId, InFlight | None]) -> None:
        """Also invalidates the pod's prefill time while it has another worker's prompt: it would cover both prompts."""
        self._owners.ledger.apply_remote(worker, rows, self._clock())
        for pod, work in rows.items():
            if work is not None and work.prefill_requests:
                self._owners.calibrator.clock(pod).disturbed()

    def _apply_dispatches(self, worker: int, update: WorkerUpdate) -> None:
        if self._early is not None:
            self._early.append((worker, update))
            return
        if update.snapshot:
            self._withdraw_all(worker)
        predicted, pending = self._owners.local.predicted, self._pending.setdefault(worker, {})
        for dispatch in update.dispatched:
            if dispatch.number in pending:
                continue  # the snapshot before this update contained it
            blocks = hash_array()
            blocks.frombytes(dispatch.blocks)
            pending[dispatch.number] = predicted.begin(
                dispatch.pod, blocks, ttl_s=dispatch.ttl_s, capacity_blocks=dispatch.capacity_blocks
            )
            self._owners.classes.apply_remote(blocks, self._clock())
        for numbers, end in ((update.confirmed, self._confirm), (update.withdrawn, predicted.withdraw)):
            for number in numbers:
                if (prediction := pending.pop(number, None)) is not None:
                    end(prediction)

    def _confirm(self, prediction: Prediction) -> None:
        self._owners.local.predicted.confirm(prediction, self._clock())

    def _withdraw_all(self, worker: int) -> None:
        """Withdraw the dispatches of a worker that have no outcome."""
        if self._early is not None:
            self._early = [early for early in self._early if early[0] != worker]
        for prediction in self._pending.pop(worker, {}).values():
            self._owners.local.predicted.withdraw(prediction)

    def _apply_report(self, report: SpeedReport) -> None:
        fleet, calibrator = self._owners.fleet, self._owners.calibrator
        if isinstance(report, PrefillReport):
            computed = fleet.status(report.pod)
            if computed is not None:
                calibrator.observe_prefill(computed.pod, report.seen, self._clock(), remote=True)
            return
        sender, receiver = fleet.status(report.sender), fleet.status(report.receiver)
        if sender is not None and receiver is not None:
            calibrator.observe_transfer(
                sender.pod, receiver.pod, report.tokens, report.elapsed_ms, report.concurrent, remote=True
            )
