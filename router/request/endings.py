"""Settles requests, however they ended, and passes one `EndedRequest` to everything that records requests."""

from __future__ import annotations

from collections.abc import Sequence

from router.admission.tenant import Tenant
from router.endpoints import Endpoint
from router.errors import NoReadyPod, RouterError, Stopping, code_of
from router.observe.counters import Counters
from router.observe.ended import EndedRequest, EndingSink, UsedTokens
from router.observe.receipts import CLIENT_GONE, Outcome
from router.request.clock import Clock
from router.request.context import RequestContext, counted_prompt_tokens, outcome_of, ttft_of_one_pod
from router.request.error_responses import response_for
from router.request.fleet_state import FleetState
from router.request.inbound import Trace
from router.request.queues import RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.response_reader import TokenCountingReader


class Endings:
    """Ends requests. `records_usage`: whether sinks receive what each request used."""

    def __init__(
        self,
        state: FleetState,
        counters: Counters,
        sinks: Sequence[EndingSink],
        clock: Clock,
        *,
        charges: QuotaCharges | None = None,
        queues: RequestQueues | None = None,
        records_usage: bool = False,
    ) -> None:
        self._state = state
        self._counters = counters
        self._sinks = sinks
        self._clock = clock
        self._charges = charges
        self._queues = queues
        self._records_usage = records_usage

    def quota_refusal(self, tenant: Tenant, endpoint: Endpoint) -> RouterError | None:
        """Why none of a tenant's requests needs to be read now; None if one does."""
        return self._charges.spent(tenant, endpoint) if self._charges is not None else None

    def begin(self) -> None:
        """Count a request that is served; `end` must follow."""
        self._counters.in_flight(1)

    def failed(self, context: RequestContext, error: RouterError, *, has_answered: bool) -> None:
        """Record why no response was sent, or not to its end. `has_answered`: whether its status was sent."""
        context.result, context.error = error.code, str(error)
        if not has_answered:
            context.status = response_for(error).status

    def interrupted(self, context: RequestContext, *, by_client: bool) -> None:
        """Record that the client left, or else that the router stops."""
        context.result = CLIENT_GONE if by_client else Stopping.code

    def end(self, context: RequestContext, *, was_slow: bool = False) -> None:
        """Settle the request, however it ended. `was_slow`: the response had to wait for its client."""
        phase, now_s = context.phases.current, self._clock.now_s()
        context.phases.enter("settle", now_s)
        self._counters.in_flight(-1)
        outcome = outcome_of(context, now_s, self._clock.unix_s())
        used = usage_of(context, outcome) if self._records_usage or context.hold is not None else None
        if used is not None and context.hold is not None and self._charges is not None:
            self._charges.end(context.hold, used, is_in_background=context.is_in_background)
        self._observe(context, outcome, now_s, was_slow=was_slow)
        context.phases.end(self._clock.now_s())
        self._pass_on(
            EndedRequest(
                outcome=outcome,
                phase=phase,
                status=context.status,
                error=context.error,
                tenant=context.request.tenant,
                tries=context.tries,
                client_request_id=context.inbound.given_id,
                workload=context.workload,
                recorded=context.recorded,
                decision=context.decision,
                prompt=context.prompt,
                used=used if self._records_usage else None,
                trace=context.inbound.trace,
            )
        )

    def refused(
        self, endpoint: Endpoint, error: Exception, request_id: str = "", trace: Trace | None = None, tenant: str = ""
    ) -> None:
        """Settle a request that was refused before its body was read. `tenant`: who sent it, if that is known."""
        model = error.model if isinstance(error, NoReadyPod) else ""
        outcome = self._unread(endpoint, code_of(error), request_id, model, trace)
        self._end_unread(outcome, tenant, response_for(error).status, str(error), trace)

    def abandoned(self, endpoint: Endpoint, tenant: str) -> None:
        self._end_unread(self._unread(endpoint, CLIENT_GONE), tenant)

    def _unread(
        self, endpoint: Endpoint, result: str, request_id: str = "", model: str = "", trace: Trace | None = None
    ) -> Outcome:
        trace_id, at_s = trace.trace_id if trace is not None else "", self._clock.unix_s()
        return Outcome(id=request_id, trace_id=trace_id, at_s=at_s, model=model, endpoint=endpoint, result=result)

    def _end_unread(
        self, outcome: Outcome, tenant: str, status: int = 0, error: str = "", trace: Trace | None = None
    ) -> None:
        used = unused(outcome, tenant, status) if self._records_usage and tenant else None
        self._pass_on(
            EndedRequest(
                outcome=outcome, is_read=False, status=status, error=error, tenant=tenant, used=used, trace=trace
            )
        )

    def _pass_on(self, ended: EndedRequest) -> None:
        for sink in self._sinks:
            sink(ended)

    def _observe(self, context: RequestContext, ended: Outcome, now_s: float, *, was_slow: bool) -> None:
        """Compare what was expected with what happened."""
        state, decision, chosen = self._state, context.decision, ended.served
        if chosen is not None and decision is not None and context.prompt is not None and ended.ttft_ms is not None:
            ttft_ms = ended.ttft_ms - context.waited_s * 1000
            state.calibrator.compare_ttft(ended.model, decision, chosen, ttft_ms)
        if ttft := ttft_of_one_pod(context):
            pod, expected_ms, actual_ms = ttft
            state.breaker.first_token(pod, context.client, expected_ms, actual_ms, now_s)
        if context.result != "ok":
            return
        pieces = context.reader.pieces if context.request.stream else 0  # about one a token
        if tokens := ended.output_tokens or pieces:
            tenant = context.tenant.name if context.hold is not None else ""
            state.output_lengths.answered(context.request.adapter or context.request.model, tokens, tenant)
        if self._queues is not None and not was_slow:
            self._queues.answered(context, now_s)


def usage_of(context: RequestContext, ended: Outcome) -> UsedTokens:
    """What a request used. One that no pod has received or that its pod refused used no tokens; attempts of a request
    that another pod served then are not counted."""
    request, reader, estimated = context.request, context.reader, []
    prompt = cached = output = 0
    if ended.served is not None and context.status < 400 and _was_received(context):
        reported, cached_tokens, counted = counted_prompt_tokens(context), ended.cached_tokens, ended.output_tokens
        prompt = context.prompt_tokens if reported is None else reported
        if reported is None:
            estimated.append("prompt_tokens")
        if cached_tokens is None:
            estimated += ("cached_tokens", "computed_tokens")
        cached = min(prompt, ended.served.cached_tokens if cached_tokens is None else cached_tokens)
        if counted is None:
            counted = reader.tokens if isinstance(reader, TokenCountingReader) else 0
            estimated.append("output_tokens")
        output = counted
    return UsedTokens(
        request_id=ended.id,
        at_s=ended.at_s,
        tenant=request.tenant,
        model=ended.model,
        adapter=request.adapter,
        endpoint=ended.endpoint,
        status=context.status,
        result=ended.result,
        prompt_tokens=prompt,
        cached_tokens=cached,
        computed_tokens=prompt - cached,
        output_tokens=output,
        ttft_ms=ended.ttft_ms,
        estimated=tuple(estimated),
    )


def unused(ended: Outcome, tenant: str, status: int) -> UsedTokens:
    """The usage of a request that was refused before its body was read."""
    return UsedTokens(
        request_id=ended.id,
        at_s=ended.at_s,
        tenant=tenant,
        model=ended.model,
        endpoint=ended.endpoint,
        status=status,
        result=ended.result,
        prompt_tokens=0,
        cached_tokens=0,
        computed_tokens=0,
        output_tokens=0,
    )


def _was_received(context: RequestContext) -> bool:
    """Whether the last pod may have computed the request: not if the attempt failed before its response began."""
    return context.status > 0 or not context.failures or len(context.failures) < context.tries
