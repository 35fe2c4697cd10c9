"""Requests that wait in front of the fleet until a pod has a place for them.

`admission/admission_queue.py` decides who waits, goes or is refused. A waiting request is matched and decided again
before it is sent, so it goes where its prefix is then. A front calls `RequestQueues.send_next` while requests wait:
again when it returns 0, or one begins or stops to wait, else after the milliseconds that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.admission.admission_queue import (
    MIN_RECHECK_MS,
    AdmissionConfig,
    AdmissionQueue,
    QueueCandidate,
    Reason,
    Refusal,
    queue_candidate,
)
from router.admission.fair_order import Waiting
from router.admission.tenant import NO_SLO
from router.decision import Candidate
from router.errors import MalformedRequest, Overloaded, RouterError, ShareExceeded
from router.observe.counters import Counters
from router.policy.decide import expected_ttft_ms
from router.request.context import RequestContext
from router.request.decisions import RequestDecisions
from router.request.effects import Effects, Turns
from router.request.fleet_state import Clock, FleetState

DEADLINE_HEADER = b"x-request-deadline-ms"
MAX_DEADLINE_DIGITS = 9


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`senders`: see `AdmissionQueue`."""

    limits: AdmissionConfig
    senders: Callable[[], int]


@dataclass(slots=True, eq=False)
class RequestQueues:
    """The queues of all models."""

    settings: QueueSettings
    state: FleetState
    decisions: RequestDecisions
    counters: Counters
    clock: Clock
    _queues: dict[str, AdmissionQueue] = field(default_factory=dict)

    async def wait_for_place(self, context: RequestContext, do: Effects) -> None:
        """Returns when the decided request may be sent. Raises `Overloaded` or `ShareExceeded`."""
        queue, now_s = self._queue_of(context.request.model), self.clock.now_s()
        one = Waiting(context.tenant, _ttft_limit_ms(context), len(context.request.body), context)
        assert context.decision is not None
        candidates = context.decision.candidates
        [best] = self._candidates(context, candidates[:1], now_s)
        if queue.send_at_once(one, best, now_s, len(candidates)):
            return
        self.counters.queued(1)
        try:
            self._offer(queue, one, now_s, do)
            await do.turn(queue, one)
        finally:
            queue.leave(one)
            context.waited_s = self.clock.now_s() - now_s
            self.counters.queued(-1)
            self.counters.queue_left(context.request.model, context.waited_s)

    def send_next(self, queue: AdmissionQueue, now_s: float, do: Turns) -> float:
        """Send the first request that has a place, and refuse those that are late. Returns the milliseconds until it is
        worth trying again: 0 after one was sent, infinite where none waits. The request must be booked before the next
        call."""
        while isinstance(found := queue.expire(now_s), Waiting):
            if evident_limit_ms(found.context) is not None:
                self._learn(found.context, is_late=True, tpot_ms=None)
            do.go(found, self._late(found))
        soonest_ms = found
        for one in queue.first():
            context: RequestContext = one.context
            try:
                scene, decision = self.decisions.decide_again(context, now_s)
            except RouterError as error:
                queue.leave(one)
                do.go(one, error)
                return 0.0
            candidates = self._candidates(context, decision.candidates, now_s)
            sent_or_closed = queue.try_send(one, candidates, now_s)
            if isinstance(sent_or_closed, QueueCandidate):
                others = list(decision.candidates)
                first = others.pop(candidates.index(sent_or_closed))
                self.decisions.keep_decision(context, scene, replace(decision, candidates=(first, *others)))
                do.go(one, None)
                return 0.0
            soonest_ms = min(soonest_ms, sent_or_closed.wait_ms)
            if sent_or_closed.all_closed:
                break
        return max(soonest_ms, MIN_RECHECK_MS)

    def answered(self, context: RequestContext, now_s: float) -> None:
        """Observe whether a request met its SLO, from a stream that its client has read as fast as it came."""
        first_s, limit_ms = context.first_token_s, evident_limit_ms(context)
        if first_s is None or limit_ms is None or not (context.request.stream and context.is_first_attempt):
            return
        tokens, decoding_ms = context.reader.output_tokens, (now_s - context.phases.began_s - first_s) * 1000
        tpot_ms = None if tokens is None else decoding_ms / (tokens - 1) if tokens > 1 else 0.0
        self._learn(context, is_late=first_s * 1000 > limit_ms, tpot_ms=tpot_ms)

    def _learn(self, context: RequestContext, *, is_late: bool, tpot_ms: float | None) -> None:
        """Update the margins of a model's queue."""
        model = context.request.model
        queue = self._queues[model]
        queue.answered(context.tenant.name, is_late, tpot_ms)
        self.counters.queue_learnt(model, queue.error_share.for_all, queue.rest_ms.for_all)

    def _queue_of(self, model: str) -> AdmissionQueue:
        queue = self._queues.get(model)
        if queue is None:
            tpot_ms = (self.decisions.routing.slo_of(model) or NO_SLO).tpot_ms
            queue = self._queues[model] = AdmissionQueue(self.settings.limits, tpot_ms, self.settings.senders)
        return queue

    def _offer(self, queue: AdmissionQueue, one: Waiting, now_s: float, do: Effects) -> None:
        """Queue a request, and refuse those for which it is too full. Raises `Overloaded` or `ShareExceeded`."""
        context: RequestContext = one.context
        assert context.decision is not None
        candidates = self._candidates(context, context.decision.candidates, now_s)
        if (refusal := queue.offer(one, candidates, now_s, self._pods(context))) is not None:
            raise self._refused(context, refusal)
        while (dropped := queue.overflow()) is not None:
            if dropped is one:
                raise self._late(one)
            do.go(dropped, self._late(dropped))

    def _candidates(self, context: RequestContext, those: Sequence[Candidate], now_s: float) -> list[QueueCandidate]:
        inflight, tokens = self.state.ledger.inflight(), context.prompt_tokens
        return [queue_candidate(one, inflight, now_s, tokens, expected_ttft_ms(one.cost)) for one in those]

    def _pods(self, context: RequestContext) -> int:
        model = context.request.adapter or context.request.model
        return sum(status.pod.serves(model) for status in self.state.fleet.snapshot.pods)

    def _late(self, one: Waiting) -> RouterError:
        return self._refused(one.context, Refusal(Reason.FLEET, self.settings.limits.max_wait_ms / 1000))

    def _refused(self, context: RequestContext, refusal: Refusal) -> RouterError:
        self.counters.place_refused(context.request.model, refusal.reason.value)
        after_s = refusal.retry_after_s
        if refusal.reason is Reason.TENANT:
            return ShareExceeded(
                f"Your requests use your share of the pods: this one would be late. Retry in {after_s:.1f} s.", after_s
            )
        return Overloaded(f"All pods are busy, and this request would be late. Retry in {after_s:.1f} s.", after_s)


def _ttft_limit_ms(context: RequestContext) -> float:
    """Until when the client wants the first token, else what the SLO allows."""
    for name, value in context.head.headers:
        if name == DEADLINE_HEADER:
            context.ttft_limit_ms = None
            return _deadline_ms(value)
    assert context.ttft_limit_ms is not None
    return context.ttft_limit_ms


def evident_limit_ms(context: RequestContext) -> float | None:
    """The limit of the first token that shows an error of predictions if it is missed. None where the client chose the
    limit, because it could choose one to be missed, or where the price of a prompt that was not read is a guess."""
    return None if context.prompt is None else context.ttft_limit_ms


def _deadline_ms(value: bytes) -> float:
    if not (value.isdigit() and len(value) <= MAX_DEADLINE_DIGITS):
        raise MalformedRequest("The header x-request-deadline-ms must be a whole number of milliseconds.")
    return float(value)
