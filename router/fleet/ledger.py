"""What has been sent to each pod that is not finished?

A lease is booked before the first await that follows a decision and released whatever happens, so that the next
decision already sees it. Sums are kept incrementally; what other replicas of the router have in flight is added to
them. This file never waits, never reads a clock and never decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

import msgspec

from router.decision import Lease
from router.types import InFlight, Pod, PodId, StepBegan

_NOTHING = InFlight()
_UNSEEN = StepBegan()


class _Work(msgspec.Struct, gc=False):
    """Of one pod. `prefilling`: its leases without a first token, in the order in which they were booked."""

    requests: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    context_tokens: int = 0
    decode_tokens: int = 0
    pulls: int = 0
    head_since_s: float = 0.0
    prefilling: dict[int, Lease] = msgspec.field(default_factory=dict)


class Ledger:
    """Open leases and their sums by pod."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: set[int] = set()
        self._pods: dict[PodId, _Work] = {}
        self._inflight: dict[PodId, InFlight] = {}
        self._others: Mapping[PodId, InFlight] = {}
        self._steps: dict[PodId, StepBegan] = {}

    def book(self, pod: Pod, prompt_tokens: int, cached_tokens: int, now_s: float, *, prefills: bool = True) -> Lease:
        """A place on `pod` for a prompt of which `cached_tokens` leading tokens need no compute. O(1).

        With `prefills` off the pod only decodes: another one computes the prompt for it."""
        lease = Lease(
            id=next(self._ids),
            pod=pod.id,
            prefill_tokens=prompt_tokens - cached_tokens if prefills else 0,
            prefill_ms=pod.speed.compute_ms(cached_tokens, prompt_tokens) if prefills else 0.0,
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
            work.prefill_tokens += lease.prefill_tokens
            work.prefill_ms += lease.prefill_ms
        else:
            work.decode_tokens += prompt_tokens
        self._publish(pod.id, work)
        return lease

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Its prefill is done and leaves the queue. Again, or after the release, it changes nothing."""
        work = self._pods.get(lease.pod)
        if work is not None and lease.id in work.prefilling:
            self._without_prefill(work, lease, now_s)
            work.decode_tokens += lease.context_tokens
            self._publish(lease.pod, work)

    def stepped(self, pod: PodId, now_s: float) -> None:
        """Tokens of `pod` came out: a step of it has ended and the next one begins. O(1), for every piece of a stream.

        A prompt that takes several steps keeps the first of them."""
        work = self._pods.get(pod)
        if work is None:
            return
        known = self._steps.get(pod)
        if known is None or not work.prefilling or known.at_s < work.head_since_s:
            self._steps[pod] = StepBegan(now_s, work.prefill_ms)

    def steps(self) -> Mapping[PodId, StepBegan]:
        """The step under way of every pod that streams, as far as it was seen. One shallow copy of a dict."""
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
        self._publish(lease.pod, work)

    def pull_began(self, holder: PodId) -> int:
        """`holder` sends KV to another pod from now on, until `pull_ended`. How many others it is sending."""
        work = self._pods.setdefault(holder, _Work())
        work.pulls += 1
        self._publish(holder, work)
        return work.pulls - 1

    def pull_ended(self, holder: PodId) -> None:
        """One of its transfers is done, or given up."""
        work = self._pods[holder]
        work.pulls -= 1
        self._publish(holder, work)

    def on(self, pod: PodId) -> InFlight:
        """The sums of all replicas on one pod. O(1)."""
        own, others = self._inflight.get(pod, _NOTHING), self._others.get(pod)
        return _sum(own, others) if others else own

    def step_of(self, pod: PodId) -> StepBegan:
        """Its step under way."""
        return self._steps.get(pod, _UNSEEN)

    def own(self) -> Mapping[PodId, InFlight]:
        """This router's sums of every pod that has any, as they stand: later changes do not show in what was returned.

        One shallow copy of a dict: O(busy pods), 2 us at 500."""
        return dict(self._inflight)

    def others(self, replicas: Iterable[Mapping[PodId, InFlight]]) -> None:
        """From now on, these are the sums of the other replicas."""
        total: dict[PodId, InFlight] = {}
        for replica in replicas:
            for pod, work in replica.items():
                total[pod] = _sum(total.get(pod, _NOTHING), work)
        self._others = total

    def others_prefill(self, pod: PodId) -> bool:
        """Whether other replicas have prompts there without a first token."""
        work = self._others.get(pod)
        return work is not None and work.prefill_requests > 0

    def inflight(self) -> Mapping[PodId, InFlight]:
        """The sums of all replicas, as they stand. O(busy pods)."""
        if not self._others:
            return self.own()
        total = dict(self._others)
        for pod, work in self._inflight.items():
            total[pod] = _sum(work, total[pod]) if pod in total else work
        return total

    def _without_prefill(self, work: _Work, lease: Lease, now_s: float) -> None:
        """Where it was the first in line, the next is in the pod's hands from now on."""
        if lease.id == next(iter(work.prefilling)):
            work.head_since_s = now_s
        del work.prefilling[lease.id]
        work.prefill_tokens -= lease.prefill_tokens
        # Sums of floats drift; an empty queue is exactly empty.
        work.prefill_ms = work.prefill_ms - lease.prefill_ms if work.prefilling else 0.0

    def _publish(self, pod: PodId, work: _Work) -> None:
        if not work.requests and not work.pulls:
            del self._pods[pod]
            self._inflight.pop(pod, None)
            self._steps.pop(pod, None)
            return
        head = next(iter(work.prefilling.values()), None)
        self._inflight[pod] = InFlight(
            work.requests,
            len(work.prefilling),
            work.prefill_tokens,
            work.prefill_ms,
            work.context_tokens,
            work.pulls,
            work.decode_tokens,
            head.prefill_ms if head else 0.0,
            work.head_since_s,
        )


def _sum(own: InFlight, other: InFlight) -> InFlight:
    """What another router's prefill has done so far is not known here: only our own head shrinks."""
    return InFlight(
        own.requests + other.requests,
        own.prefill_requests + other.prefill_requests,
        own.prefill_tokens + other.prefill_tokens,
        own.prefill_ms + other.prefill_ms,
        own.context_tokens + other.context_tokens,
        own.pulls + other.pulls,
        own.decode_tokens + other.decode_tokens,
        own.head_ms,
        own.head_since_s,
    )
