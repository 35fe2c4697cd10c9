"""What has been sent to each pod that is not finished?

A lease is booked before the first await that follows a decision and released whatever happens, so that the next
decision already sees it. Sums are kept incrementally, and made into values when somebody reads them; what other
replicas of the router and the other workers of this one have in flight is added to them. This file never waits, never
reads a clock and never decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from itertools import count
from math import inf
from operator import attrgetter

import msgspec

from router.decision import Lease
from router.types import InFlight, Pod, PodId, StepBegan

_NOTHING = InFlight()


class _Work(msgspec.Struct, gc=False):
    """Of one pod. `prefilling`: its leases without a first token, in the order in which they were booked; `step_at_s`
    and `step_prefill_ms`: its step under way, as `StepBegan` has it."""

    requests: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    context_tokens: int = 0
    decode_tokens: int = 0
    pulls: int = 0
    head_since_s: float = 0.0
    step_at_s: float = -inf
    step_prefill_ms: float = 0.0
    prefilling: dict[int, Lease] = msgspec.field(default_factory=dict)


_IDLE = _Work()


class Watch(msgspec.Struct, gc=False):
    """A stretch of time. `most_prompts`: so many without a first token were on one pod at once, of all."""

    most_prompts: int


class Ledger:
    """Open leases and their sums by pod."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: set[int] = set()
        self._pods: dict[PodId, _Work] = {}
        self._inflight: dict[PodId, InFlight] = {}
        self._changed: dict[PodId, _Work] = {}
        """Whose sums in `_inflight` are old."""
        self._steps: dict[PodId, StepBegan] = {}
        self._stepped: dict[PodId, _Work] = {}
        """Whose steps in `_steps` are."""
        self._replicas: Mapping[PodId, InFlight] = {}
        self._workers: dict[int, dict[PodId, InFlight]] = {}
        self._others: dict[PodId, InFlight] = {}
        """Of replicas and workers together."""
        self._total: dict[PodId, InFlight] = {}
        """Own and others', kept up only while there are others, and with `_inflight`."""
        self._watches: dict[PodId, Watch] = {}
        self.on_change: Callable[[PodId], None] | None = None
        """Called with the id of each pod whose own sums changed."""

    def book(self, pod: Pod, prompt_tokens: int, cached_tokens: int, now_s: float, *, prefills: bool = True) -> Lease:
        """A place on `pod` for a prompt of which `cached_tokens` leading tokens need no compute. O(1).

        With `prefills` off the pod only decodes: another one computes the prompt for it."""
        prefill_tokens, prefill_ms = 0, 0.0
        if prefills:
            prefill_tokens = prompt_tokens - cached_tokens
            prefill_ms = pod.speed.compute_ms(cached_tokens, prompt_tokens)
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
        else:
            work.decode_tokens += prompt_tokens
        self._note(pod.id, work)
        return lease

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Its prefill is done and leaves the queue. Again, or after the release, it changes nothing."""
        work = self._pods.get(lease.pod)
        if work is not None and lease.id in work.prefilling:
            self._without_prefill(work, lease, now_s)
            work.decode_tokens += lease.context_tokens
            self._note(lease.pod, work)

    def stepped(self, pod: PodId, now_s: float) -> None:
        """Tokens of `pod` came out: a step of it has ended and the next one begins. O(1), for every piece of a stream.

        A prompt that takes several steps keeps the first of them."""
        work = self._pods.get(pod)
        if work is not None and (not work.prefilling or work.step_at_s < work.head_since_s):
            work.step_at_s = now_s
            work.step_prefill_ms = work.prefill_ms
            self._stepped[pod] = work

    def steps(self) -> Mapping[PodId, StepBegan]:
        """The step under way of every pod that streams, as far as it was seen. One shallow copy of a dict, and a value
        for every pod that has stepped since the last one."""
        for pod, work in self._stepped.items():
            self._steps[pod] = StepBegan(work.step_at_s, work.step_prefill_ms)
        self._stepped.clear()
        return dict(self._steps)

    def release(self, lease: Lease, now_s: float) -> None:
        """Give the place back. Again, it changes nothing."""
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

    def pull_began(self, holder: PodId) -> int:
        """`holder` sends KV to another pod from now on, until `pull_ended`. How many others it is sending."""
        work = self._pods.setdefault(holder, _Work())
        work.pulls += 1
        self._note(holder, work)
        return work.pulls - 1

    def pull_ended(self, holder: PodId) -> None:
        """One of its transfers is done, or given up."""
        work = self._pods[holder]
        work.pulls -= 1
        self._note(holder, work)

    def on(self, pod: PodId) -> InFlight:
        """The sums of all on one pod."""
        return self._sums_of_all().get(pod, _NOTHING)

    def decoding(self, pod: PodId) -> tuple[int, int, float]:
        """Of the sums of all on one pod, the requests that have their first token, and their prompt tokens; and when
        its step under way began, minus infinity where that was not seen. O(1)."""
        own, others = self._pods.get(pod, _IDLE), self._others.get(pod)
        requests, tokens = own.requests - len(own.prefilling), own.decode_tokens
        if others is not None:
            requests += others.decode_requests
            tokens += others.decode_tokens
        return requests, tokens, own.step_at_s

    def own(self) -> Mapping[PodId, InFlight]:
        """This process's sums of every pod that has any, as they stand: later changes do not show in what was returned.

        One shallow copy of a dict: O(busy pods), 2 us at 500; and a value for every pod that has changed since anybody
        read the sums of any."""
        return dict(self._sums_of_own())

    def own_on(self, pod: PodId) -> InFlight | None:
        """This process's sums of one pod; None where it has nothing there."""
        return self._sums_of_own().get(pod)

    def requests_of_router(self, pod: PodId) -> int:
        """Leases of all workers of this router on one pod."""
        rows = (self._sums_of_own(), *self._workers.values())
        return sum(row[pod].requests for row in rows if pod in row)

    def others(self, replicas: Iterable[Mapping[PodId, InFlight]]) -> None:
        """From now on, these are the sums of the other replicas."""
        total: dict[PodId, InFlight] = {}
        for replica in replicas:
            for pod, work in replica.items():
                total[pod] = _sum(total.get(pod, _NOTHING), work, head=_NOTHING)
        changed = {*self._replicas, *total}
        self._replicas = total
        self._take_in(changed)

    def apply_remote(self, number: int, rows: Mapping[PodId, InFlight | None]) -> None:
        """Replace these rows of another worker. None: no work of that worker is left on the pod."""
        known = self._workers.setdefault(number, {})
        for pod, work in rows.items():
            if work is None:
                known.pop(pod, None)
            else:
                known[pod] = work
        self._take_in(rows)

    def remove_worker(self, number: int) -> None:
        """Drop all rows of a worker that is gone."""
        self._take_in(self._workers.pop(number, {}))

    def others_prefill(self, pod: PodId) -> bool:
        """Whether others have prompts there without a first token."""
        work = self._others.get(pod)
        return work is not None and work.prefill_requests > 0

    @contextmanager
    def watching(self, pod: PodId) -> Iterator[Watch]:
        """From now to its end, one pod is watched; one watch a pod at a time."""
        watch = self._watches[pod] = Watch(self.on(pod).prefill_requests)
        try:
            yield watch
        finally:
            del self._watches[pod]

    def inflight(self) -> Mapping[PodId, InFlight]:
        """The sums of all, as they stand. As `own`."""
        return dict(self._sums_of_all())

    def _sums_of_all(self) -> Mapping[PodId, InFlight]:
        own = self._sums_of_own()
        return self._total if self._others else own

    def _sums_of_own(self) -> Mapping[PodId, InFlight]:
        for pod, work in self._changed.items():
            self._inflight[pod] = _sums(work)
            if self._others:
                self._add_up(pod)
        self._changed.clear()
        return self._inflight

    def _take_in(self, pods: Iterable[PodId]) -> None:
        """What others have on these pods has changed."""
        own = self._sums_of_own()
        if not self._others:
            self._total = dict(own)
        for pod in pods:
            rows = [rows[pod] for rows in (self._replicas, *self._workers.values()) if pod in rows]
            if rows:
                self._others[pod] = reduce(_beside, rows)
            else:
                self._others.pop(pod, None)
            self._add_up(pod)
            self._watch(pod)

    def _add_up(self, pod: PodId) -> None:
        own, others = self._inflight.get(pod), self._others.get(pod)
        total = _beside(own, others) if own and others else own or others
        if total is None:
            self._total.pop(pod, None)
        else:
            self._total[pod] = total

    def _watch(self, pod: PodId) -> None:
        watch = self._watches.get(pod)
        if watch is not None:
            watch.most_prompts = max(watch.most_prompts, self.on(pod).prefill_requests)

    def _without_prefill(self, work: _Work, lease: Lease, now_s: float) -> None:
        """Where it was the first in line, the next is in the pod's hands from now on."""
        if lease.id == next(iter(work.prefilling)):
            work.head_since_s = now_s
        del work.prefilling[lease.id]
        work.prefill_tokens -= lease.prefill_tokens
        # Sums of floats drift; an empty queue is exactly empty.
        work.prefill_ms = work.prefill_ms - lease.prefill_ms if work.prefilling else 0.0

    def _note(self, pod: PodId, work: _Work) -> None:
        """Its sums: between two readings of them, several times as a rule."""
        if work.requests or work.pulls:
            self._changed[pod] = work
        else:
            self._forget(pod)
        if pod in self._watches:
            self._watch(pod)
        if self.on_change is not None:
            self.on_change(pod)

    def _forget(self, pod: PodId) -> None:
        del self._pods[pod]
        for rows in (self._inflight, self._changed, self._steps, self._stepped):
            rows.pop(pod, None)
        if self._others:
            self._add_up(pod)


def _sums(work: _Work) -> InFlight:
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
    )


def _sum(one: InFlight, other: InFlight, head: InFlight) -> InFlight:
    return InFlight(
        requests=one.requests + other.requests,
        prefill_requests=one.prefill_requests + other.prefill_requests,
        prefill_tokens=one.prefill_tokens + other.prefill_tokens,
        prefill_ms=one.prefill_ms + other.prefill_ms,
        context_tokens=one.context_tokens + other.context_tokens,
        pulls=one.pulls + other.pulls,
        decode_tokens=one.decode_tokens + other.decode_tokens,
        head_ms=head.head_ms,
        head_since_s=head.head_since_s,
    )


def _beside(one: InFlight, other: InFlight) -> InFlight:
    """Workers of one router have one clock: of two heads the pod works on the one that is first for longer. What other
    replicas' prefill has done so far is not known here: they have no head."""
    heads = [work for work in (one, other) if work.head_ms]
    return _sum(one, other, head=min(heads, key=_head_since_s) if heads else _NOTHING)


_head_since_s = attrgetter("head_since_s")
