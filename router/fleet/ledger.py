"""The unfinished requests of each pod.

A lease is booked before the first await after a decision and always released, so that the next decision sees it. Sums
by pod are updated with each lease and converted to `InFlight` values when read; the work of other routers
is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from math import inf

import msgspec

from router.decision import Lease
from router.fleet.congestion_estimator import CongestionEstimator
from router.types import Congestion, FleetSnapshot, InFlight, Pod, PodId, StepBegan

_NOTHING = InFlight()


class _Work(msgspec.Struct, gc=False):
    """Sums of one pod. `prefilling`: its leases without a first token, in booking order; `step_at_s` and
    `step_prefill_ms`: its current step as in `StepBegan`; `piece_at_s`: the last piece that began no step."""

    requests: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    context_tokens: int = 0
    decode_tokens: int = 0
    pulls: int = 0
    head_since_s: float = 0.0
    step_at_s: float = -inf
    step_prefill_ms: float = 0.0
    piece_at_s: float = -inf
    prefilling: dict[int, Lease] = msgspec.field(default_factory=dict)


_IDLE = _Work()


class Watch(msgspec.Struct, gc=False):
    """An observed period of one pod. `max_prompts`: the maximum number of prompts without a first token."""

    max_prompts: int


class Ledger:
    def __init__(self) -> None:
        self._ids = count(1)
        self.booked_prefill_ms: dict[PodId, float] = {}
        """By pod, the prefill of all leases that this process has ever booked."""
        self._open: set[int] = set()
        self._pods: dict[PodId, _Work] = {}
        self._inflight: dict[PodId, InFlight] = {}
        self._changed: dict[PodId, _Work] = {}
        """Pods whose sums in `_inflight` are out of date."""
        self._steps: dict[PodId, StepBegan] = {}
        self._stepped: dict[PodId, _Work] = {}
        """Pods whose steps in `_steps` are out of date."""
        self._others: Mapping[PodId, InFlight] = {}
        """Sums of the other routers."""
        self._total: dict[PodId, InFlight] = {}
        """Sums of all; updated with `_inflight`, and only while there are others."""
        self._watches: dict[PodId, Watch] = {}
        self._congestion = CongestionEstimator()

    def book(
        self,
        pod: Pod,
        prompt_tokens: int,
        cached_tokens: int,
        now_s: float,
        *,
        prefills: bool = True,
        encoded_tokens: int = 0,
    ) -> Lease:
        """Book a prompt of which `cached_tokens` leading tokens need no compute, and pictures of `encoded_tokens` that
        must be encoded first. O(1).

        Without `prefills` the pod only decodes: another pod computes the prompt."""
        prefill_tokens, prefill_ms = 0, 0.0
        if prefills:
            prefill_tokens = prompt_tokens - cached_tokens
            prefill_ms = pod.speed.compute_ms(cached_tokens, prompt_tokens)
            prefill_ms += pod.speed.c1_ms_per_token * encoded_tokens
        lease = Lease(
            id=next(self._ids),
            pod=pod.id,
            prefill_tokens=prefill_tokens,
            prefill_ms=prefill_ms,
            context_tokens=prompt_tokens,
        )
        work = self._pods.get(pod.id)
        if work is None:
            work = self._pods[pod.id] = _Work()
        self._open.add(lease.id)
        work.requests += 1
        work.context_tokens += prompt_tokens
        if prefills:
            if not work.prefilling:
                work.head_since_s = now_s
            work.prefilling[lease.id] = lease
            work.prefill_tokens += prefill_tokens
            work.prefill_ms += prefill_ms
            self.booked_prefill_ms[pod.id] = self.booked_prefill_ms.get(pod.id, 0.0) + prefill_ms
            self._congestion.booked(pod.id, now_s)
        else:
            work.decode_tokens += prompt_tokens
        self._note(pod.id, work)
        return lease

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Remove its prefill from the queue. Idempotent; no effect after the release."""
        work = self._pods.get(lease.pod)
        if work is not None and lease.id in work.prefilling:
            self._without_prefill(work, lease, now_s)
            work.decode_tokens += lease.context_tokens
            self._note(lease.pod, work)

    def stepped(self, pod: PodId, now_s: float) -> None:
        """Tokens of `pod` arrived: one of its steps has ended and the next one begins. O(1), called for every chunk.

        If a prompt takes several steps, the begin of the first is kept."""
        work = self._pods.get(pod)
        if work is not None and (not work.prefilling or work.step_at_s < work.head_since_s):
            work.step_at_s = now_s
            work.step_prefill_ms = work.prefill_ms
            self._stepped[pod] = work
        elif work is not None:
            work.piece_at_s = now_s

    def received_at_s(self, pod: PodId) -> float:
        """When the last piece of a stream that still runs has come from the pod."""
        work = self._pods.get(pod, _IDLE)
        return max(work.step_at_s, work.piece_at_s)

    def steps(self) -> Mapping[PodId, StepBegan]:
        """The current step of every pod that streams, as far as observed. One shallow copy of a dict, and a new value
        for every pod that has stepped since the last call."""
        for pod, work in self._stepped.items():
            self._steps[pod] = StepBegan(work.step_at_s, work.step_prefill_ms)
        self._stepped.clear()
        return dict(self._steps)

    def release(self, lease: Lease, now_s: float) -> None:
        """Release the lease. Idempotent."""
        if lease.id not in self._open:
            return
        self._open.remove(lease.id)
        work = self._pods[lease.pod]
        if lease.id in work.prefilling:
            self._without_prefill(work, lease, now_s)
        else:
            work.decode_tokens -= lease.context_tokens
        work.requests -= 1
        work.context_tokens -= lease.context_tokens
        self._note(lease.pod, work)

    def remove(self, pod: PodId) -> None:
        """Drop the history of a pod that is gone; its open leases stay."""
        self.booked_prefill_ms.pop(pod, None)

    def pull_began(self, holder: PodId) -> int:
        """`holder` starts sending KV to another pod, until `pull_ended`. Returns its other transfers in progress."""
        work = self._pods.setdefault(holder, _Work())
        work.pulls += 1
        self._note(holder, work)
        return work.pulls - 1

    def pull_ended(self, holder: PodId) -> None:
        work = self._pods[holder]
        work.pulls -= 1
        self._note(holder, work)

    def on(self, pod: PodId) -> InFlight:
        return self._sums_of_all().get(pod, _NOTHING)

    def decoding(self, pod: PodId) -> tuple[int, int, float]:
        """(requests with a first token, their prompt tokens, begin of the current step) of one pod, of all routers;
        minus infinity for a step whose begin was not observed. O(1)."""
        own, others = self._pods.get(pod, _IDLE), self._others.get(pod)
        requests, tokens = own.requests - len(own.prefilling), own.decode_tokens
        if others is not None:
            requests += others.decode_requests
            tokens += others.decode_tokens
        return requests, tokens, own.step_at_s

    def own(self) -> Mapping[PodId, InFlight]:
        """This process's sums by pod, without idle pods. O(busy pods): a copy of a dict, 2 us at 500, and new values of
        changed pods."""
        return dict(self._sums_of_own())

    def congestion(self, fleet: FleetSnapshot, model: str, now_s: float) -> Congestion:
        """How busy the pods of a model are with prompts, of all routers. See `CongestionEstimator`."""
        return self._congestion.means(fleet, model, self._sums_of_all, now_s)

    def requests_of_router(self, pod: PodId) -> int:
        return self._pods.get(pod, _IDLE).requests

    def apply_replicas(self, replicas: Iterable[Mapping[PodId, InFlight]], now_s: float) -> None:
        total: dict[PodId, InFlight] = {}
        for replica in replicas:
            for pod, work in replica.items():
                total[pod] = _sum(total.get(pod, _NOTHING), work)
        changed = {*self._others, *total}
        own = self._sums_of_own()
        if not self._others:
            self._total = dict(own)
        self._others = total
        for pod in changed:
            self._add_up(pod)
            self._watch(pod)
            is_busy = self.others_prefill(pod) or bool(self._pods.get(pod, _IDLE).prefilling)
            self._congestion.set_busy(pod, is_busy, now_s)

    def others_prefill(self, pod: PodId) -> bool:
        """Whether other routers have prompts there without a first token."""
        work = self._others.get(pod)
        return work is not None and work.prefill_requests > 0

    @contextmanager
    def watching(self, pod: PodId) -> Iterator[Watch]:
        """Observe one pod during the context; one watch per pod at a time."""
        watch = self._watches[pod] = Watch(self.on(pod).prefill_requests)
        try:
            yield watch
        finally:
            del self._watches[pod]

    def inflight(self) -> Mapping[PodId, InFlight]:
        """A snapshot of the sums of all routers; cost as `own`."""
        return dict(self._sums_of_all())

    def _sums_of_all(self) -> Mapping[PodId, InFlight]:
        own = self._sums_of_own()
        return self._total if self._others else own

    def _sums_of_own(self) -> Mapping[PodId, InFlight]:
        for pod, work in self._changed.items():
            self._inflight[pod] = _sums(work, self._congestion.prompts_per_s(pod))
            if self._others:
                self._add_up(pod)
        self._changed.clear()
        return self._inflight

    def _add_up(self, pod: PodId) -> None:
        own, others = self._inflight.get(pod), self._others.get(pod)
        total = _sum(own, others) if own and others else own or others
        if total is None:
            self._total.pop(pod, None)
        else:
            self._total[pod] = total

    def _watch(self, pod: PodId) -> None:
        watch = self._watches.get(pod)
        if watch is not None:
            watch.max_prompts = max(watch.max_prompts, self.on(pod).prefill_requests)

    def _without_prefill(self, work: _Work, lease: Lease, now_s: float) -> None:
        """If it was the head, the pod starts on the next prompt now."""
        if lease.id == next(iter(work.prefilling)):
            work.head_since_s = now_s
        del work.prefilling[lease.id]
        work.prefill_tokens -= lease.prefill_tokens
        # Sums of floats drift; an empty queue is exactly empty.
        work.prefill_ms = work.prefill_ms - lease.prefill_ms if work.prefilling else 0.0
        if not work.prefilling and not self.others_prefill(lease.pod):
            self._congestion.set_busy(lease.pod, False, now_s)

    def _note(self, pod: PodId, work: _Work) -> None:
        """Record a change; the sums are built on the next reading."""
        if work.requests or work.pulls:
            self._changed[pod] = work
        else:
            self._forget(pod)
        if pod in self._watches:
            self._watch(pod)

    def _forget(self, pod: PodId) -> None:
        del self._pods[pod]
        for rows in (self._inflight, self._changed, self._steps, self._stepped):
            rows.pop(pod, None)
        if self._others:
            self._add_up(pod)


def _sums(work: _Work, prompts_per_s: float) -> InFlight:
    head = next(iter(work.prefilling.values()), None)
    return InFlight(
        requests=work.requests,
        prefill_requests=len(work.prefilling),
        prefill_tokens=work.prefill_tokens,
        prefill_ms=work.prefill_ms,
        context_tokens=work.context_tokens,
        pulls=work.pulls,
        decode_tokens=work.decode_tokens,
        head_ms=head.prefill_ms if head else 0.0,
        head_since_s=work.head_since_s,
        prompts_per_s=prompts_per_s,
    )


def _sum(one: InFlight, other: InFlight) -> InFlight:
    """The sum, with the head of `one`: how far other routers' prompts are is not known here."""
    return InFlight(
        requests=one.requests + other.requests,
        prefill_requests=one.prefill_requests + other.prefill_requests,
        prefill_tokens=one.prefill_tokens + other.prefill_tokens,
        prefill_ms=one.prefill_ms + other.prefill_ms,
        context_tokens=one.context_tokens + other.context_tokens,
        pulls=one.pulls + other.pulls,
        decode_tokens=one.decode_tokens + other.decode_tokens,
        head_ms=one.head_ms,
        head_since_s=one.head_since_s,
        prompts_per_s=one.prompts_per_s + other.prompts_per_s,
    )
