"""Does this request go now, wait, or be refused?

While no pod can take it, a request waits here and not in an engine: it can still go wherever a place comes free
first, in fair order, or be refused at once if it would be late. One queue per model. It has no clock: the caller gives
the time, and asks again when `next_s` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, count, islice
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from router.admission.fair_order import FairOrder, FairShares, Waiting
from router.admission.tenant import Tenant
from router.decision import Candidate, Split
from router.types import PRIOR_OUTPUT_TOKENS, InFlight, Pod, PodId, Role

MAX_NAMES = 10_000
"""Beyond that, those that are not ahead of their pace are dropped."""
HEADROOM = 1.2
"""Decode steps may take up to 1 / 1.2 of their limit on average."""
MIN_SHARE = 0.05
"""A pod whose decode steps leave no time for prompts gets them for this share of its time."""


def prefill_share(step_ms: float, tpot_ms: float) -> float:
    """The share of a pod's time for prompts, if its decode steps of `step_ms` may become `tpot_ms` / `HEADROOM` on
    average: if prompts take a share s of the time, a step of d ms becomes d / (1 - s), as those who decode wait. And as
    an answer of few tokens waits for a whole prompt or for none, a pod gets some time between two of them."""
    return max(1 - HEADROOM * step_ms / tpot_ms, MIN_SHARE)


class PrefillPace:
    """Prefill by pod: the time at which its prompts are computed at its pace, as in GCRA (ITU-T I.371)."""

    def __init__(self) -> None:
        self._even_s: dict[str, float] = {}

    def wait_ms(self, pod: str, now_s: float) -> float:
        """The time until the next prompt is due; 0 if it is."""
        return max(self._even_s.get(pod, now_s) - now_s, 0.0) * 1000

    def sent(self, pod: str, prefill_ms: float, pace: float, now_s: float, rest_ms: float = 0.0) -> float:
        """Count a prompt that was sent. `pace`: milliseconds of prefill in a millisecond. `rest_ms`: the time without
        prompts after it, at least. Returns the milliseconds that it takes at this pace."""
        if len(self._even_s) >= MAX_NAMES:
            self._even_s = {one: at_s for one, at_s in self._even_s.items() if at_s > now_s}
        even_s, taken_ms = self._even_s.get(pod, now_s), max(prefill_ms / pace, prefill_ms + rest_ms)
        self._even_s[pod] = max(even_s, now_s) + taken_ms / 1000
        return taken_ms


MAX_DELAY_S = 0.3
"""How much later a handed-over prompt may get its first token."""


class HandoffsDue:
    """When prompts arrive at decode pods whose prefill pods compute them now, by decode pod.

    A decode pod also computes short prompts itself. Those that are handed over to it wait meanwhile, because an engine
    first completes what it has begun. So it gets no prompt that would delay them."""

    def __init__(self) -> None:
        self._due_s: dict[str, list[float]] = {}

    def sent(self, pod: str, due_s: float, now_s: float) -> None:
        """A prompt is handed over to `pod` at `due_s`."""
        if len(self._due_s) >= MAX_NAMES:
            self._due_s = {name: due for name, due in self._due_s.items() if max(due) > now_s}
        self._due_s[pod] = [*(one for one in self._due_s.get(pod, ()) if one > now_s), due_s]

    def wait_ms(self, pod: str, prefill_ms: float, now_s: float) -> float:
        """The time until the pod can compute a prompt for so long and delay none that is due by now."""
        due_s = self._due_s.get(pod)
        if not due_s:
            return 0.0
        until_s = now_s + prefill_ms / 1000 - MAX_DELAY_S
        return max((one - now_s for one in due_s if now_s < one < until_s), default=0.0) * 1000


class LearntMargin(msgspec.Struct, gc=False):
    """A margin between 0 and `high`, learnt from how often it was too small. `allowed`: the share of requests that may
    miss their limit.

    Adaptive conformal inference (Gibbs and Candès, 2106.00170): while the margin is within its bounds, the share that
    misses is within `high` / (`step` n) of `allowed` after n requests, however the errors are distributed."""

    value: float
    high: float
    step: float
    allowed: float
    seen: int = 0
    """Number of observations."""

    def observe(self, has_missed: bool) -> None:
        moved = self.value + self.step * (has_missed - self.allowed)
        self.value = min(max(moved, 0.0), self.high)
        self.seen += 1


class TenantMargins:
    """A margin that each tenant learns from its own requests, and one for all: their lower median, weighted by the
    number of observations up to `FULL_VOTE`. So no minority of them moves it beyond what the others want."""

    def __init__(self, first: LearntMargin) -> None:
        self._first = first
        self._own: dict[str, LearntMargin] = {}
        """By tenant, the one that was observed least recently first."""
        self.for_all = first.value

    def of(self, tenant: str) -> float:
        return self._own.get(tenant, self._first).value

    def observe(self, tenant: str, has_missed: bool) -> None:
        own = self._own.pop(tenant) if tenant in self._own else msgspec.structs.replace(self._first)
        self._own[tenant] = own
        own.observe(has_missed)
        if len(self._own) > MAX_VOTES:
            del self._own[next(iter(self._own))]
        if len(self._own) == 1 or own.seen % VOTE_EVERY == 0:
            self.for_all = self._voted()

    def _voted(self) -> float:
        votes = sorted((one.value, min(one.seen, FULL_VOTE)) for one in self._own.values())
        half, below = sum(weight for _, weight in votes) / 2, accumulate(weight for _, weight in votes)
        return next(value for (value, _), weights in zip(votes, below, strict=True) if weights >= half)


MAX_VOTES, FULL_VOTE, VOTE_EVERY = 256, 100, 16
"""Tenants with a vote, observations for a full one, and those of a tenant between two votes."""
LOOKS = 8
"""Waiting requests that are decided again when a pod has a free place."""
MIN_RECHECK_MS = 2.0
"""A pod's queue is an estimate, so its end may pass without a free place."""
AHEAD_MS = 300.0
"""How far a process may be ahead of its part of a pod's pace, for each other one that sends to the pod: in a short time
they do not send equally much, and the pod's queue shows what they sent."""
FIRST_TOKENS_PART = 0.2
"""The share of the requests that may miss their SLO by a late first token. The others may get later tokens late:
prompts on the same pod, which nobody can predict, delay short answers."""
FIRST_ERROR_SHARE, MAX_ERROR_SHARE, ERROR_STEP = 0.05, 0.5, 0.05
FIRST_REST_MS, MAX_REST_MS, REST_STEP_MS = 200.0, 1000.0, 15.0
"""First and highest values, and steps, of the learnt margins: `LearntMargin`. In an overload of the conversation trace,
with 100 ms more rest 1.6 % fewer requests miss their SLO, so it is learnt from about 400 requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """The queue in front of the fleet. While no pod has a place for it, a request waits in the router and not in an
    engine; a request that would be late is refused at once, with 503, or with 429 if its tenant has used its share."""

    max_requests: PositiveInt = 1000
    """Waiting requests of one model. Beyond that, the tenant with the most waiting prefill loses its
    last one."""
    max_bytes: PositiveInt = 256 * 1024 * 1024
    """Their bodies."""
    max_wait_ms: PositiveFloat = 1200.0
    """The longest wait that is predicted for a request that is not refused."""
    slo_share: Annotated[float, Field(ge=0.5, le=0.999)] = 0.975
    """The share of the accepted requests that shall meet the SLO; a larger one refuses more. How much later than
    predicted a first token may come, and how long a pod only decodes between two prompts, is learnt for it."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class QueueCandidate(msgspec.Struct, frozen=True, gc=False):
    """A pod that could compute the prompt. `cost_ms`, `ttft_ms`: if it is sent there now. `step_ms`: a decode step of
    the pod that answers, with this request; `decodes`: requests decode on the pod that computes the prompt, too.
    `decode_pod`: if another one answers; `room_ms`: the time until it has room for the KV, beyond `ttft_ms`."""

    pod: PodId
    cost_ms: float
    ttft_ms: float
    queue_ms: float
    prefill_ms: float
    step_ms: float
    decodes: bool = True
    decode_pod: PodId = ""
    room_ms: float = 0.0


class Reason(StrEnum):
    FLEET = "fleet"
    """All pods are busy."""
    TENANT = "tenant"
    """The tenant has used its share."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """The request would be late. It would have been in time `retry_after_s` later."""

    reason: Reason
    retry_after_s: float


class Closed(NamedTuple):
    """The pod that a request waits for is open after `wait_ms`. `all_closed`: none of its pods is open now."""

    wait_ms: float
    all_closed: bool


class AdmissionQueue:
    """The queue of one model. `tpot_ms`: the strictest limit of those that are served; `senders` returns the number of
    processes that send to the same pods now, of all routers: each sends its part. `error_share`, `rest_ms`: the
    margins that it starts with."""

    def __init__(
        self,
        limits: AdmissionConfig,
        tpot_ms: float = math.inf,
        senders: Callable[[], int] = lambda: 1,
        error_share: float = FIRST_ERROR_SHARE,
        rest_ms: float = FIRST_REST_MS,
    ) -> None:
        self._limits = limits
        self._tpot_ms = tpot_ms
        self._senders = senders
        missing, part = 1 - limits.slo_share, FIRST_TOKENS_PART
        error = LearntMargin(error_share, MAX_ERROR_SHARE, ERROR_STEP, missing * part)
        self.error_share = TenantMargins(error)
        """How much later than predicted a first token may come: for each tenant, its own."""
        rest = LearntMargin(rest_ms if tpot_ms < math.inf else 0.0, MAX_REST_MS, REST_STEP_MS, missing * (1 - part))
        self.rest_ms = TenantMargins(rest)
        """The time between two prompts of a pod: that for all."""
        self._order = FairOrder()
        self._pace = PrefillPace()
        self._shares = FairShares()
        self._handoffs = HandoffsDue()
        self._numbers = count()
        self.held_bytes = 0
        """Bodies of the waiting requests."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiting]:
        return self._order.in_order()

    @property
    def _longest_wait_ms(self) -> float:
        """After it, a request is refused that was predicted to wait no longer than the limit."""
        return 2 * self._limits.max_wait_ms

    def send_at_once(self, request: Waiting, candidate: QueueCandidate, now_s: float, pods: int = 1) -> bool:
        """Whether a new request goes to its best candidate now: it is in time, and either nobody waits and the pod is
        open, or its tenant has not used its share: then those who use more wait for it. Counts it as sent if so."""
        if candidate.ttft_ms > request.ttft_limit_ms:
            return False
        tenant, order = request.tenant, self._order
        if (order or self._wait_ms(candidate, now_s) > 0) and (
            not self._shares.is_within(tenant, now_s, self._limits.max_wait_ms)
            or candidate.queue_ms > self._limits.max_wait_ms
            or candidate.room_ms > 0
            or not order.may_overtake(tenant)
        ):
            return False
        self._sent(tenant, candidate, now_s, pods)
        return True

    def offer(
        self, request: Waiting, candidates: Sequence[QueueCandidate], now_s: float, pods: int = 0
    ) -> Refusal | None:
        """Queue a new request, or refuse it because it would be late or the queue is full. `candidates`, at least one,
        are of any number of its model's `pods`. A pod may be open at once."""
        late_ms = self._late_ms(request, candidates, now_s, pods, own=True)
        if late_ms > 0:
            is_own_work = self._late_ms(request, candidates, now_s, pods, own=False) <= 0
            reason = Reason.TENANT if is_own_work and self._order.others_wait(request.tenant) else Reason.FLEET
            return Refusal(reason, late_ms / 1000)
        best = self._choose(candidates, now_s, self._limits.max_wait_ms)
        spare_ms = min(request.ttft_limit_ms - (best.ttft_ms - best.queue_ms), self._longest_wait_ms)
        request.number, request.start_by_s = next(self._numbers), now_s + spare_ms / 1000
        request.prefill_ms = best.prefill_ms
        self._order.add(request)
        self.held_bytes += request.body_bytes
        return None

    def overflow(self) -> Waiting | None:
        """Take out the request that the queue is too full for: the last of the tenant with the most prefill for its
        weight, in the lowest band. None if all fit. To be called after `offer`, until None."""
        limits = self._limits
        if len(self._order) <= limits.max_requests and self.held_bytes <= limits.max_bytes:
            return None
        last = self._order.last_of_largest()
        if last is not None:
            self.leave(last)
        return last

    def expire(self, now_s: float) -> Waiting | float:
        """Take out a request that can no longer get its first token in time; or return the milliseconds until the next
        one cannot. To be called before requests are sent, until it returns a number."""
        one = self._order.most_urgent()
        if one is None or one.start_by_s >= now_s:
            return math.inf if one is None else (one.start_by_s - now_s) * 1000
        self.leave(one)
        return one

    def leave(self, one: Waiting) -> None:
        """Take out a request whose client is gone, or that is refused. Idempotent."""
        if one.is_queued:
            self._order.remove(one)
            self.held_bytes -= one.body_bytes

    def first(self) -> list[Waiting]:
        """The requests to try to send, in order."""
        return list(islice(self, LOOKS))

    def try_send(self, one: Waiting, candidates: Sequence[QueueCandidate], now_s: float) -> QueueCandidate | Closed:
        """The best of at least one candidate of a waiting request, if it is open: the request does not wait any more.

        Raises `KeyError` if it does not wait."""
        best = self._choose(candidates, now_s, (one.start_by_s - now_s) * 1000)
        wait_ms = self._wait_ms(best, now_s)
        if wait_ms <= 0:
            self._order.serve(one, best.prefill_ms)
            self.held_bytes -= one.body_bytes
            self._sent(one.tenant, best, now_s, len(candidates))
            return best
        self._order.estimate(one, best.prefill_ms)
        soonest_ms = min(self._wait_ms(candidate, now_s) for candidate in candidates)
        return Closed(soonest_ms, True) if soonest_ms > 0 else Closed(wait_ms, False)

    def answered(self, tenant: str, is_late: bool, tpot_ms: float | None) -> None:
        """Learn from an answered request: whether its first token came later than its SLO allows, and the mean time per
        token after it, None if that is unknown."""
        self.error_share.observe(tenant, is_late)
        if tpot_ms is not None:
            self.rest_ms.observe(tenant, tpot_ms > self._tpot_ms)

    def _sent(self, tenant: Tenant, candidate: QueueCandidate, now_s: float, pods: int) -> None:
        if candidate.decode_pod:
            self._handoffs.sent(candidate.decode_pod, now_s + candidate.ttft_ms / 1000, now_s)
        rest_ms = self.rest_ms.for_all * self._senders() if candidate.decodes else 0.0
        taken_ms = self._pace.sent(candidate.pod, candidate.prefill_ms, self._share(candidate), now_s, rest_ms)
        self._shares.sent(tenant, taken_ms / pods, now_s)

    def _share(self, candidate: QueueCandidate) -> float:
        share = prefill_share(candidate.step_ms, self._tpot_ms) if candidate.decodes else 1.0
        return share / self._senders()

    def _wait_ms(self, candidate: QueueCandidate, now_s: float) -> float:
        ahead_ms = AHEAD_MS * (self._senders() - 1)
        return max(
            self._pace.wait_ms(candidate.pod, now_s) - ahead_ms,
            self._handoffs.wait_ms(candidate.pod, candidate.prefill_ms, now_s),
            candidate.queue_ms,
            candidate.room_ms,
            0.0,
        )

    def _choose(self, candidates: Sequence[QueueCandidate], now_s: float, spare_ms: float) -> QueueCandidate:
        """The cheapest candidate that is open in time, else the one that is open first."""
        in_time = [one for one in candidates if self._wait_ms(one, now_s) <= spare_ms]
        if not in_time:
            return min(candidates, key=lambda one: self._wait_ms(one, now_s))
        return min(in_time, key=lambda one: one.cost_ms + max(self._wait_ms(one, now_s) - one.queue_ms, 0.0))

    def _late_ms(
        self, request: Waiting, candidates: Sequence[QueueCandidate], now_s: float, pods: int, *, own: bool
    ) -> float:
        """How much later than allowed the first token would come, with the error of predictions."""
        limits = self._limits
        ahead_ms = self._order.ahead_ms(request.tenant, now_s + self._longest_wait_ms / 1000, own=own)
        turn_ms = self._filled_ms(ahead_ms * len(candidates) / max(pods, len(candidates)), candidates, now_s)
        error = 1 + self.error_share.of(request.tenant.name)

        def late_ms(candidate: QueueCandidate) -> float:
            wait_ms = max(turn_ms, self._wait_ms(candidate, now_s))
            ttft_ms = max(wait_ms, candidate.queue_ms) + candidate.ttft_ms - candidate.queue_ms
            return max(ttft_ms * error - request.ttft_limit_ms, wait_ms * error - limits.max_wait_ms)

        return min(map(late_ms, candidates))

    def _filled_ms(self, ahead_ms: float, candidates: Sequence[QueueCandidate], now_s: float) -> float:
        """The time until the pods have taken `ahead_ms` of prefill at their pace, and one of them is open."""
        share = 0.0
        at_ms = 0.0
        for wait_ms, more in sorted((self._wait_ms(one, now_s), self._share(one)) for one in candidates):
            if share and (wait_ms - at_ms) * share >= ahead_ms:
                break
            ahead_ms -= (wait_ms - at_ms) * share
            at_ms, share = wait_ms, share + more
        return at_ms + ahead_ms / share


FULL_SHARE = 0.9
"""The share of a pod's KV for prompts; the rest is for answers."""
_IDLE = InFlight()


def queue_candidate(
    candidate: Candidate, inflight: Mapping[PodId, InFlight], now_s: float, prompt_tokens: int, ttft_ms: float
) -> QueueCandidate:
    """The decode step counts all requests on the pod, since those without a first token will decode when this prompt is
    computed (Mooncake, 2407.00079), but not this one: in an overload, a few percent would refuse most long prompts.
    What is handed over waits for the prompts that the decode pod computes itself, and for room for its KV."""
    plan, answering = candidate.plan, candidate.plan.pod
    computing = plan.prefill if isinstance(plan, Split) else answering
    there = inflight.get(answering.id, _IDLE)
    ahead = inflight.get(computing.id, _IDLE)
    if answering is not computing and there.prefill_requests:
        ttft_ms = max(ttft_ms, there.queue_ms(now_s))
    return QueueCandidate(
        pod=computing.id,
        cost_ms=candidate.cost.total_ms,
        ttft_ms=ttft_ms,
        queue_ms=ahead.queue_ms(now_s) if ahead.prefill_requests else 0.0,
        prefill_ms=computing.speed.compute_ms(candidate.cached_tokens, prompt_tokens),
        step_ms=answering.speed.step_ms(there.requests, there.context_tokens),
        decodes=computing.role is not Role.PREFILL,
        decode_pod="" if answering is computing else answering.id,
        room_ms=max(_until_room_ms(answering, there, prompt_tokens) - ttft_ms, 0.0),
    )


def _until_room_ms(pod: Pod, there: InFlight, prompt_tokens: int) -> float:
    """The time until a decode pod has room for the KV of one prompt more, if all that are on their way to it arrive
    before: requests leave it evenly over the time that one takes, and then all have left."""
    if pod.role is not Role.DECODE or not pod.capacity_tokens or not there.context_tokens:
        return 0.0
    used_tokens = there.context_tokens
    short_tokens = used_tokens + prompt_tokens - pod.capacity_tokens * FULL_SHARE
    if short_tokens <= 0:
        return 0.0
    return min(short_tokens / used_tokens, 1.0) * PRIOR_OUTPUT_TOKENS * pod.speed.step_ms(there.requests, used_tokens)
