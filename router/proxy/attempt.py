"""The phases attempt and relay: tries the candidates of a request until one has begun to respond.

After a failure before the first byte the next candidate is tried, if `policy/retry.py` and the retry budget allow it.
Which failures count against a pod is in `fleet/breaker.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from router.decision import Candidate, Plan, Split
from router.errors import ConnectFailed, NoReadyPod, UpstreamBroken, UpstreamError
from router.index.stored_responses import StoredResponse
from router.observe.receipts import Failure
from router.observe.token_gaps import gaps
from router.policy.decide import expected_ttft_ms
from router.policy.retry import (
    DOUBTFUL_STATUS,
    MAX_FAILED_ATTEMPTS,
    RETRY_STATUSES,
    Retry,
    RetryBudget,
    retry_rule,
)
from router.proxy.booking import Booking
from router.proxy.dependencies import ProxyDependencies
from router.proxy.headers import HeaderList
from router.proxy.kv_transfer import PullExecutor, SplitExecutor
from router.proxy.predictions import AttemptPredictions
from router.proxy.relay import AnyReply, Downstream, relay
from router.proxy.request_context import RequestContext, result_of_status
from router.proxy.upstream import UpstreamSender
from router.types import PodId

SAMPLED_STREAMS = 16
"""The time between tokens is measured in every stream of this number."""
UNARY_PREFILL_SLACK = 1.5
"""The first token of an unstreamed response cannot be observed: its prefill counts as done after this multiple of the
expected time."""


class Attempts:
    """Tries candidates, and records what their pods did."""

    def __init__(self, needs: ProxyDependencies) -> None:
        self._needs = needs
        self._settings = needs.settings
        self._metrics = needs.metrics
        self._breaker = needs.breaker
        self._streams = itertools.count(1)
        self._budget = RetryBudget(needs.settings.retry_budget)
        self._rules = needs.settings.headers
        self._sender = UpstreamSender(needs.pool, self._rules)
        self._splits = SplitExecutor(needs, self._sender)
        self._pulls = PullExecutor(needs, self._sender)

    async def attempt_in_order(self, context: RequestContext, client: Downstream) -> None:
        """Try candidates until one has begun to respond. Raises the error of the last one."""
        candidate = self._first(context)
        self._budget.count_request(time.monotonic())
        try:
            while True:
                context.tries += 1
                try:
                    await self.attempt(context, candidate, client)
                    return
                except UpstreamError as error:
                    self._record_failure(context, candidate, error, bytes_sent=client.started)
                    following = self._next(context)
                    if following is None or not self._may_retry(context, error, bytes_sent=client.started):
                        raise
                    candidate = following
        finally:
            if context.suspects:
                self._count_doubts(context)

    async def attempt(self, context: RequestContext, candidate: Candidate, client: Downstream) -> None:
        """Try one candidate. Its leases are booked before the first await, and released in any case."""
        context.phases.enter("attempt")
        context.candidate = candidate
        needs, prompt = self._needs, context.prompt
        pictures = needs.pictures.seen(prompt.pictures, needs.fleet.snapshot) if prompt and prompt.pictures else ()
        booking = Booking(needs.ledger, candidate, context.prompt_tokens, needs.calibrator.clock, pictures)
        endpoint, prefill_timer = context.request.endpoint, None
        predictions = AttemptPredictions(self._needs, candidate.plan, context.prompt, endpoint)
        try:
            prefill_timer = self._start_prefill_timer(context, candidate, booking)
            reply = await self._open(context, candidate, booking)
            try:
                if reply.status in RETRY_STATUSES and not self._is_last(context) and self._has_budget():
                    raise UpstreamBroken(f"pod {reply.pod}: status {reply.status}", pod=reply.pod)
                context.status = reply.status
                await self.relay(context, candidate, reply, client, booking, predictions)
            finally:
                reply.close()
            self._record_result(context, candidate.plan, reply)
        except asyncio.CancelledError:
            if booking.prefill_done:
                predictions.first_token(candidate.plan.pod.id)
            raise
        finally:
            if prefill_timer is not None:
                prefill_timer.cancel()
            if booking.has_handed_over:
                predictions.computed(context.prefill_pod)
            predictions.withdraw()
            booking.release()
            self._observe_speed(context, candidate, booking)

    def relay(
        self,
        context: RequestContext,
        candidate: Candidate,
        reply: AnyReply,
        client: Downstream,
        booking: Booking,
        predictions: AttemptPredictions,
    ) -> Awaitable[None]:
        """Send the response to the client, byte for byte."""
        context.phases.enter("relay")

        def first_token() -> None:
            if reply.status >= 400:
                return  # an error response may repeat parts of the prompt
            context.first_token_s = context.phases.elapsed_s()
            booking.first_token()
            predictions.first_token(reply.pod)
            self._breaker.seen_alive(reply.pod)
            if context.reader.response_id and context.may_be_stored:
                self._store(context, reply.pod)
            if context.suspects:
                self._count_failures(context, candidate.plan)
            if context.request.stream and not context.prefill_pod:
                context.drop_prompt()

        headers = [*self._rules.downstream(reply.headers), *self._route_headers(context, candidate)]
        stepped: Callable[[float], None] = partial(self._needs.ledger.stepped, candidate.plan.pod.id)
        if context.request.stream and next(self._streams) % SAMPLED_STREAMS == 0:
            stepped = gaps(stepped, self._metrics.inter_token_s.labels(context.request.model, context.workload).observe)
        return relay(reply, client, context.reader, headers, first_token, stepped)

    def _store(self, context: RequestContext, pod: PodId) -> None:
        """Remember which pod has the response, before the client learns its id."""
        request, now_s = context.request, time.monotonic()
        model, owner = request.adapter or request.model, context.tenant.name
        stored = StoredResponse(context.reader.response_id, pod, model, now_s, owner)
        self._needs.responses.stored.learn(stored, now_s)

    # --- which candidate ---

    def _first(self, context: RequestContext) -> Candidate:
        """The first usable candidate. Raises the reason where there is none."""
        assert context.decision is not None
        candidate = self._next(context)
        if candidate is None:
            reason = self._splits.unusable_reason(context, context.decision.candidates[0].plan)
            raise reason or NoReadyPod("No pod may serve this request.")
        return candidate

    def _next(self, context: RequestContext) -> Candidate | None:
        """The next usable candidate, preferably one without pods that failed this request; None if there is none."""
        assert context.decision is not None
        attempts = context.policy.attempts if context.policy else None
        if context.tries >= (attempts or 1 + self._settings.retries):
            return None
        rest: Sequence[Candidate] = context.decision.candidates
        if context.candidate is not None:
            failed = [failure.pod for failure in context.failures if failure.pod]
            rest = rest[rest.index(context.candidate) + 1 :]
            rest = sorted(rest, key=lambda candidate: _uses_any(candidate.plan, failed))
        for candidate in rest:
            if self._splits.unusable_reason(context, candidate.plan) is None:
                return candidate
        return None

    def _is_last(self, context: RequestContext) -> bool:
        """Whether no other candidate may be tried once a pod has received this attempt."""
        tried = len(context.suspects) + 1 >= MAX_FAILED_ATTEMPTS
        return tried or not context.repeatable or self._next(context) is None

    def _may_retry(self, context: RequestContext, error: UpstreamError, *, bytes_sent: bool) -> bool:
        """Whether another candidate may be tried after this failure. Each call may spend retry budget."""
        law, reason = retry_rule(error, bytes_sent=bytes_sent), error.code
        if context.suspects and (len(context.suspects) >= MAX_FAILED_ATTEMPTS or not context.repeatable):
            return False
        allowed = law is Retry.ALWAYS or (law is Retry.IN_BUDGET and self._budget.spend(time.monotonic()))
        if allowed:
            self._metrics.retries.labels(reason).inc()
        elif law is Retry.IN_BUDGET:
            self._metrics.retries_refused.labels(reason).inc()
        return allowed

    def _has_budget(self) -> bool:
        """Whether there is retry budget for another candidate, instead of relaying an error status."""
        left = self._budget.has_retry(time.monotonic())
        if not left:
            self._metrics.retries_refused.labels(UpstreamBroken.code).inc()
        return left

    # --- results ---

    def _record_failure(
        self, context: RequestContext, candidate: Candidate, error: UpstreamError, *, bytes_sent: bool
    ) -> None:
        """Count the failure, also for the breaker of the pod that caused it, if any. Where the request may be the
        cause, the pod is a suspect until another pod serves the request."""
        code, now_s = error.code, time.monotonic()
        self._metrics.sent.labels(error.pod or candidate.pod.id, code).inc()
        context.failures = (*context.failures, Failure(error.pod, code, str(error)))
        if isinstance(error, ConnectFailed):
            if not error.local:
                self._breaker.failure(error.pod, now_s)
            return
        if error.doubtful or bytes_sent:
            self._breaker.doubt(error.pod, context.client, now_s)
        if not bytes_sent:
            context.suspects = (*context.suspects, "" if error.doubtful else error.pod)

    def _record_result(self, context: RequestContext, plan: Plan, reply: AnyReply) -> None:
        """Count a relayed response."""
        context.result = result_of_status(reply.status)
        self._metrics.sent.labels(reply.pod, context.result).value += 1
        if reply.status < 400:
            if context.suspects:
                self._count_failures(context, plan)
            self._breaker.success(reply.pod)
        elif reply.status in RETRY_STATUSES or reply.status == DOUBTFUL_STATUS:
            context.suspects = (*context.suspects, reply.pod)

    def _count_failures(self, context: RequestContext, plan: Plan) -> None:
        """The pods of `plan` serve the request, so it is not the cause of earlier failures of other pods."""
        for pod in context.suspects:
            if not _uses_any(plan, [pod]):
                self._breaker.failure(pod, time.monotonic())
        context.suspects = ()

    def _count_doubts(self, context: RequestContext) -> None:
        """No pod served the request: the pods or the request may be the cause."""
        for pod in context.suspects:
            self._breaker.doubt(pod, context.client, time.monotonic())

    def _observe_speed(self, context: RequestContext, candidate: Candidate, booking: Booking) -> None:
        """Calibrate the speed of the pod that computed the prompt, and of the link that it pulled over."""
        calibrator, now_s = self._needs.calibrator, time.monotonic()
        if booking.pulled_ms is not None:
            self._pulls.observe(candidate, booking.pulled_ms, booking.concurrent_transfers)
        seen = booking.observation
        if seen is None or context.prompt is None or context.prompt.has_media:
            return
        plan = candidate.plan
        pod = plan.prefill if isinstance(plan, Split) else plan.pod
        if calibrator.wants_observation(pod, now_s):
            if (found := context.cached_tokens) is not None:
                seen = seen.corrected(candidate.cached_tokens, found)
            calibrator.observe_prefill(pod, seen, now_s)

    # --- parts of an attempt ---

    def _open(self, context: RequestContext, candidate: Candidate, booking: Booking) -> Awaitable[AnyReply]:
        """Send the request; returns the response for the client. Raises `UpstreamError`."""
        plan = candidate.plan
        if isinstance(plan, Split):
            return self._splits.open(context, plan, booking, last=self._is_last(context))
        if plan.pull is not None:
            return self._pulls.open(context, plan.pod, plan.pull.holder, last=self._is_last(context))
        if not context.repeatable:
            body = context.request.body
            return self._sender.send_once(context.inbound, plan.pod, lambda: body)
        return self._sender.send(context.inbound, plan.pod, context.request.body)

    def _start_prefill_timer(
        self, context: RequestContext, candidate: Candidate, booking: Booking
    ) -> asyncio.TimerHandle | None:
        """The timer that ends the booked prefill of an unstreamed request, whose first token cannot be observed."""
        if context.request.stream:
            return None
        expected_s = max(expected_ttft_ms(candidate.cost), booking.prefill_ms) / 1000 * UNARY_PREFILL_SLACK
        return asyncio.get_running_loop().call_later(expected_s, booking.assume_first_token)

    def _route_headers(self, context: RequestContext, candidate: Candidate) -> HeaderList:
        """The headers that the router adds to the response."""
        headers, plan = [(b"x-request-id", context.request.id.encode()), *context.limit_headers], candidate.plan
        if context.inbound.trace is not None:
            headers.append(context.inbound.trace.context())
        if not self._settings.route_headers or context.decision is None:
            return headers
        headers += [
            (b"x-warmroute-pod", plan.pod.id.encode()),
            (b"x-warmroute-policy", context.decision.policy.encode()),
            (b"x-warmroute-cached-tokens", b"%d" % candidate.cached_tokens),
        ]
        if isinstance(plan, Split):
            headers.append((b"x-warmroute-prefill-pod", plan.prefill.id.encode()))
        return headers


def _uses_any(plan: Plan, pods: list[PodId]) -> bool:
    return plan.pod.id in pods or (isinstance(plan, Split) and plan.prefill.id in pods)
