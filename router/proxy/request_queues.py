"""Requests that wait in front of the fleet until a pod has a place for them.

`admission/admission_queue.py` decides who waits, goes or is refused; this module has the clock, the coroutines that
wait, and one task for each model that has some. A waiting request is matched and decided again before it is sent, so it
goes where its prefix is then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from router.admission.admission_queue import MIN_RECHECK_MS, AdmissionQueue, Offer, Place, Reason, Refusal
from router.admission.fair_order import Waiting
from router.admission.places import place_of, places_of
from router.admission.tenant import OPEN_TENANT
from router.decision import RouteDecision
from router.errors import MalformedRequest, Overloaded, RouterError, ShareExceeded
from router.policy.decide import expected_ttft_ms
from router.proxy.dependencies import ProxyDependencies, QueueSettings
from router.proxy.request_context import RequestContext
from router.proxy.request_decision import RequestDecisions
from router.types import PrefixMatch, Scene

DEADLINE_HEADER = b"x-request-deadline-ms"
MAX_DEADLINE_DIGITS = 9


class RequestQueues:
    """The queues of all models."""

    def __init__(self, settings: QueueSettings, needs: ProxyDependencies, decisions: RequestDecisions) -> None:
        self._settings = settings
        self._needs = needs
        self._decisions = decisions
        self._queues: dict[str, _ModelQueue] = {}

    async def wait_for_place(self, context: RequestContext) -> None:
        """Return when the decided request may be sent, with its latest decision. Raises `Overloaded` or
        `ShareExceeded`."""
        assert context.decision is not None
        model = context.request.model
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _ModelQueue(self._settings, self._needs, self._decisions)
        request = Offer(context.tenant, self._ttft_limit_ms(context), len(context.request.body))
        if not queue.sends_at_once(context, request):
            began_s = time.monotonic()
            try:
                await queue.wait(context, request)
            finally:
                context.waited_s = time.monotonic() - began_s
                self._needs.metrics.queue_s.labels(model).observe(context.waited_s)

    def answered(self, context: RequestContext) -> None:
        """Learn whether a request met its SLO, from a complete response that its client has read as fast as it came.
        Only streams show it. A limit that the client chose itself does not count: it could choose one to be missed."""
        first_s, limit_ms = context.first_token_s, context.ttft_limit_ms
        if first_s is None or limit_ms is None or not context.request.stream or context.tries > 1:
            return
        tokens, decoding_ms = context.reader.output_tokens, (context.phases.elapsed_s() - first_s) * 1000
        tpot_ms = None if tokens is None else decoding_ms / (tokens - 1) if tokens > 1 else 0.0
        self._queues[context.request.model].answered(context.request.model, first_s * 1000 > limit_ms, tpot_ms)

    def _ttft_limit_ms(self, context: RequestContext) -> float:
        """Until when the client wants the first token, else what the SLO allows."""
        assert context.decision is not None
        for name, value in context.inbound.headers:
            if name == DEADLINE_HEADER:
                return _deadline_ms(value)
        slo = self._settings.slo if context.tenant.slo == OPEN_TENANT.slo else context.tenant.slo
        speed = context.decision.candidates[0].pod.speed
        context.ttft_limit_ms = slo.ttft_limit_ms(speed.prefill_ms(context.prompt_tokens))
        return context.ttft_limit_ms


def _deadline_ms(value: bytes) -> float:
    if not (value.isdigit() and len(value) <= MAX_DEADLINE_DIGITS):
        raise MalformedRequest("The header x-request-deadline-ms must be a whole number of milliseconds.")
    return float(value)


class _Waiter(msgspec.Struct, eq=False):
    """A coroutine that waits. `go` is done when its request may be sent."""

    context: RequestContext
    one: Waiting
    go: asyncio.Future[None]


class _ModelQueue:
    """The queue of one model, and the task that empties it."""

    def __init__(self, settings: QueueSettings, needs: ProxyDependencies, decisions: RequestDecisions) -> None:
        self._queue = AdmissionQueue(settings.limits, settings.slo.tpot_ms, settings.senders)
        self._max_wait_s = settings.limits.max_wait_ms / 1000
        self._needs = needs
        self._decisions = decisions
        self._waiters: dict[int, _Waiter] = {}
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def sends_at_once(self, context: RequestContext, request: Offer) -> bool:
        """Whether the request goes now, to its best candidate."""
        decision, now_s = context.decision, time.monotonic()
        assert decision is not None
        best = decision.candidates[0]
        inflight = self._needs.ledger.inflight()
        place = place_of(best, inflight, now_s, context.prompt_tokens, expected_ttft_ms(best.cost))
        return self._queue.send_at_once(request, place, now_s, len(decision.candidates))

    def answered(self, model: str, is_late: bool, tpot_ms: float | None) -> None:
        """Learn from a request that was answered."""
        queue, metrics = self._queue, self._needs.metrics
        queue.answered(is_late, tpot_ms)
        metrics.queue_error.labels(model).set(queue.error_share)
        metrics.queue_rest_s.labels(model).set(queue.rest_ms / 1000)

    async def wait(self, context: RequestContext, request: Offer) -> None:
        """Wait for a place. Raises `Overloaded` or `ShareExceeded`."""
        now_s = time.monotonic()
        assert context.decision is not None
        found = self._queue.offer(request, self._places(context, context.decision), now_s, self._pods(context))
        if isinstance(found, Refusal):
            raise self._refused(context, found)
        waiter = _Waiter(context, found, asyncio.get_running_loop().create_future())
        self._waiters[found.number] = waiter
        while (dropped := self._queue.overflow()) is not None:
            self._fail(dropped, Refusal(Reason.FLEET, self._max_wait_s))
        self._needs.metrics.queued.value += 1
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="requests that wait in front of the fleet")
        try:
            await waiter.go
        finally:
            self._needs.metrics.queued.value -= 1
            if self._waiters.pop(found.number, None) is not None:
                self._queue.leave(found)
                self._arrived.set()  # the next one may have been skipped for it

    async def _run(self) -> None:
        """Send those who wait, until nobody does."""
        try:
            while self._waiters:
                self._arrived.clear()
                wait_ms = await self._send_first()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_ms / 1000):
                        await self._arrived.wait()
        except Exception as error:
            for waiter in list(self._waiters.values()):
                if not waiter.go.done():
                    waiter.go.set_exception(error)
            raise

    async def _send_first(self) -> float:
        """Send the first request that has a place. Returns the milliseconds until it is worth trying again."""
        while isinstance(found := self._queue.expire(time.monotonic()), Waiting):
            self._fail(found, Refusal(Reason.FLEET, self._max_wait_s))
        soonest_ms = found
        for one in self._queue.first():
            waiter = self._waiters.get(one.number)
            if waiter is None or waiter.go.done():
                continue
            try:
                scene, decision = await self._decide_again(waiter.context)
            except RouterError as error:
                if not waiter.go.done():
                    waiter.go.set_exception(error)
                return 0.0
            if waiter.go.done() or one.number not in self._waiters:  # its client left meanwhile
                continue
            place = self._queue.try_send(one, self._places(waiter.context, decision), time.monotonic())
            if isinstance(place, Place):
                del self._waiters[one.number]
                self._decisions.redecided(waiter.context, scene, place.first_in(decision))
                waiter.go.set_result(None)
                await asyncio.sleep(0)  # it is booked before the next one is decided
                return 0.0
            soonest_ms = min(soonest_ms, place.wait_ms)
            if place.all_closed:
                break
        return max(soonest_ms, MIN_RECHECK_MS)

    async def _decide_again(self, context: RequestContext) -> tuple[Scene, RouteDecision]:
        match = PrefixMatch()
        if context.prompt is not None:
            match = await self._needs.store.match(context.prompt, time.monotonic())
        return self._decisions.decide_again(context, match)

    def _places(self, context: RequestContext, decision: RouteDecision) -> Sequence[Place]:
        inflight = self._needs.ledger.inflight()
        return places_of(decision, inflight, time.monotonic(), context.prompt_tokens, expected_ttft_ms)

    def _pods(self, context: RequestContext) -> int:
        model = context.request.adapter or context.request.model
        return sum(status.pod.serves(model) for status in self._needs.fleet.snapshot.pods)

    def _fail(self, one: Waiting, refusal: Refusal) -> None:
        """Refuse a request that was taken out of the queue."""
        waiter = self._waiters.pop(one.number)
        if not waiter.go.done():
            waiter.go.set_exception(self._refused(waiter.context, refusal))

    def _refused(self, context: RequestContext, refusal: Refusal) -> RouterError:
        self._needs.metrics.queue_refused.labels(context.request.model, refusal.reason.value).inc()
        after_s = refusal.retry_after_s
        if refusal.reason is Reason.TENANT:
            return ShareExceeded(
                f"Your requests use your share of the pods: this one would be late. Retry in {after_s:.1f} s.", after_s
            )
        return Overloaded(f"All pods are busy, and this request would be late. Retry in {after_s:.1f} s.", after_s)
