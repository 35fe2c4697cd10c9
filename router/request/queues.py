"""Requests that wait in front of the fleet until a pod has a place for them.

`admission/admission_queue.py` decides who waits, goes or is refused. A waiting request is matched and decided again
before it is sent, so it goes where its prefix is then. A front calls `ModelQueue.send_next` while requests wait: again
when it returns 0 or `on_change` is called, else after the milliseconds that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.admission.admission_queue import (
    MIN_RECHECK_MS,
    AdmissionConfig,
    AdmissionQueue,
    Offer,
    QueueCandidate,
    Reason,
    Refusal,
)
from router.admission.fair_order import Waiting
from router.admission.queue_candidates import queue_candidate
from router.admission.tenant import NO_SLO
from router.decision import Candidate
from router.errors import MalformedRequest, Overloaded, RouterError, ShareExceeded
from router.observe.counters import Counters
from router.policy.decide import expected_ttft_ms
from router.request.clock import Clock
from router.request.context import RequestContext
from router.request.decisions import RequestDecisions
from router.request.fleet_state import FleetState
from router.request.preparation_steps import Step, Ticket

DEADLINE_HEADER = b"x-request-deadline-ms"
MAX_DEADLINE_DIGITS = 9


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`senders`: see `AdmissionQueue`."""

    limits: AdmissionConfig
    senders: Callable[[], int]


@dataclass(slots=True, eq=False)
class RequestQueues:
    """The queues of all models. `on_change` is called with the queue in which a request begins or stops to wait."""

    settings: QueueSettings
    state: FleetState
    decisions: RequestDecisions
    counters: Counters
    clock: Clock
    _queues: dict[str, ModelQueue] = field(default_factory=dict)
    on_change: Callable[[ModelQueue], None] = lambda _queue: None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def wait_for_place(self, context: RequestContext) -> Generator[Step, None, None]:
        """Returns when the decided request may be sent. Raises `Overloaded` or `ShareExceeded`."""
        queue, now_s = self._queue_of(context.request.model), self.clock.now_s()
        offer = Offer(context.tenant, self._ttft_limit_ms(context), len(context.request.body))
        if queue.sends_at_once(context, offer, now_s):
            return
        ticket = None
        try:
            ticket = queue.offer(context, offer, now_s)
            self.on_change(queue)
            yield ticket
        finally:
            context.waited_s = self.clock.now_s() - now_s
            self.counters.queue_left(context.request.model, context.waited_s)
            if ticket is not None and queue.leave(ticket):
                self.on_change(queue)  # the next one may have been skipped for it

    def answered(self, context: RequestContext, now_s: float) -> None:
        """Observe whether a request met its SLO, from a stream that its client has read as fast as it came."""
        first_s, limit_ms = context.first_token_s, evident_limit_ms(context)
        if first_s is None or limit_ms is None or not context.request.stream or context.tries > 1:
            return
        tokens, decoding_ms = context.reader.output_tokens, (now_s - context.phases.began_s - first_s) * 1000
        tpot_ms = None if tokens is None else decoding_ms / (tokens - 1) if tokens > 1 else 0.0
        is_late = first_s * 1000 > limit_ms
        self._queues[context.request.model].answered(context.tenant.name, is_late, tpot_ms)

    def _queue_of(self, model: str) -> ModelQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = ModelQueue(model, self.settings, self.state, self.decisions, self.counters)
            self._queues[model] = queue
        return queue

    def _ttft_limit_ms(self, context: RequestContext) -> float:
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


class ModelQueue:
    def __init__(
        self, model: str, settings: QueueSettings, state: FleetState, decisions: RequestDecisions, counters: Counters
    ) -> None:
        self.model = model
        slo = decisions.routing.slo_of(model) or NO_SLO
        self._queue = AdmissionQueue(settings.limits, slo.tpot_ms, settings.senders)
        self._max_wait_s = settings.limits.max_wait_ms / 1000
        self._state = state
        self._decisions = decisions
        self._counters = counters
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def sends_at_once(self, context: RequestContext, offer: Offer, now_s: float) -> bool:
        assert context.decision is not None
        candidates = context.decision.candidates
        [best] = self._candidates(context, candidates[:1], now_s)
        return self._queue.send_at_once(offer, best, now_s, len(candidates))

    def offer(self, context: RequestContext, offer: Offer, now_s: float) -> Ticket:
        """Queue a request. Raises `Overloaded` or `ShareExceeded`."""
        assert context.decision is not None
        candidates = self._candidates(context, context.decision.candidates, now_s)
        found = self._queue.offer(offer, candidates, now_s, self._pods(context))
        if isinstance(found, Refusal):
            raise self._refused(found)
        ticket = self._tickets[found.number] = Ticket(context, found)
        while (dropped := self._queue.overflow()) is not None:
            if dropped is found:
                del self._tickets[found.number]
                raise self._refused(Refusal(Reason.FLEET, self._max_wait_s))
            self._refuse(dropped)
        return ticket

    def leave(self, ticket: Ticket) -> bool:
        """Take out a request whose client is gone. False if it does not wait any more."""
        if self._tickets.pop(ticket.waiting.number, None) is None:
            return False
        self._queue.leave(ticket.waiting)
        return True

    def send_next(self, now_s: float) -> float:
        """Send the first request that has a place, and refuse those that are late. Returns the milliseconds until it is
        worth trying again: 0 after one was sent, infinite where none waits. The request must be booked before the next
        call."""
        while isinstance(found := self._queue.expire(now_s), Waiting):
            if evident_limit_ms(self._tickets[found.number].context) is not None:
                self.answered(found.tenant.name, is_late=True, tpot_ms=None)
            self._refuse(found)
        soonest_ms = found
        for one in self._queue.first():
            context = self._tickets[one.number].context
            try:
                scene, decision = self._decisions.decide_again(context, now_s)
            except RouterError as error:
                self._queue.leave(one)
                self._tickets.pop(one.number).settle(error)
                return 0.0
            candidates = self._candidates(context, decision.candidates, now_s)
            sent_or_closed = self._queue.try_send(one, candidates, now_s)
            if isinstance(sent_or_closed, QueueCandidate):
                others = list(decision.candidates)
                first = others.pop(candidates.index(sent_or_closed))
                self._decisions.redecided(context, scene, replace(decision, candidates=(first, *others)))
                self._tickets.pop(one.number).settle(None)
                return 0.0
            soonest_ms = min(soonest_ms, sent_or_closed.wait_ms)
            if sent_or_closed.all_closed:
                break
        return max(soonest_ms, MIN_RECHECK_MS)

    def fail(self, error: Exception) -> None:
        """End the wait of all requests with this error."""
        for ticket in list(self._tickets.values()):
            self.leave(ticket)
            ticket.settle(error)

    def answered(self, tenant: str, is_late: bool, tpot_ms: float | None) -> None:
        """Update the margins by a request that was answered."""
        queue = self._queue
        queue.answered(tenant, is_late, tpot_ms)
        self._counters.queue_learnt(self.model, queue.error_share.for_all, queue.rest_ms.for_all)

    def _candidates(self, context: RequestContext, those: Sequence[Candidate], now_s: float) -> list[QueueCandidate]:
        inflight, tokens = self._state.ledger.inflight(), context.prompt_tokens
        return [queue_candidate(one, inflight, now_s, tokens, expected_ttft_ms(one.cost)) for one in those]

    def _pods(self, context: RequestContext) -> int:
        model = context.request.adapter or context.request.model
        return sum(status.pod.serves(model) for status in self._state.fleet.snapshot.pods)

    def _refuse(self, one: Waiting) -> None:
        self._tickets.pop(one.number).settle(self._refused(Refusal(Reason.FLEET, self._max_wait_s)))

    def _refused(self, refusal: Refusal) -> RouterError:
        self._counters.place_refused(self.model, refusal.reason.value)
        after_s = refusal.retry_after_s
        if refusal.reason is Reason.TENANT:
            return ShareExceeded(
                f"Your requests use your share of the pods: this one would be late. Retry in {after_s:.1f} s.", after_s
            )
        return Overloaded(f"All pods are busy, and this request would be late. Retry in {after_s:.1f} s.", after_s)
