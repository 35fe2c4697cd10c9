"""Settles requests, however they ended, and passes one `Ended` to everything that records requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from router.admission.quotas import Hold
from router.admission.tenant import OPEN_TENANT, Tenant
from router.endpoints import Endpoint
from router.errors import (
    ClientError,
    NoReadyPod,
    QuotaExceeded,
    RouterError,
    Stopping,
    UpstreamTimeout,
    code_of,
    status_of,
)
from router.fleet.output_lengths import MAX_ANSWER_TOKENS
from router.observe.counters import Counters
from router.observe.ended import CLIENT_GONE, Ended, EndingSink, UsedTokens
from router.policy.decide import expected_ttft_ms
from router.request.context import (
    RequestContext,
    counted_output_tokens,
    counted_prompt_tokens,
    ttft_of_one_pod,
)
from router.request.fleet_state import Clock, FleetState
from router.request.inbound import Trace
from router.request.queues import RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.response_reader import TokenCountingReader
from router.types import InFlight, PromptPrefix

MIN_STEP_MS = 1.0
"""A decode step takes at least this long, also on a pod whose speed is not known."""


@dataclass(slots=True, eq=False)
class Endings:
    """Ends requests. `records_usage`: whether sinks receive what each request used."""

    state: FleetState
    counters: Counters
    sinks: Sequence[EndingSink]
    clock: Clock
    charges: QuotaCharges | None = None
    queues: RequestQueues | None = None
    records_usage: bool = False

    def receive(self, tenant: Tenant, endpoint: Endpoint) -> Hold | RouterError | None:
        """Count a request as concurrent until it `has_arrived`, or return why its quota refuses it before its body."""
        return self.charges.receive(tenant, endpoint) if self.charges is not None else None

    def has_arrived(self, arriving: Hold | None) -> None:
        """A request that was received is served now, or refused. Idempotent."""
        if arriving is not None and self.charges is not None:
            self.charges.has_arrived(arriving)

    def failed(self, context: RequestContext, error: RouterError, *, has_answered: bool) -> None:
        """Record why no response was sent, or not to its end. `has_answered`: whether its status was sent."""
        context.result, context.error = error.code, str(error)
        if not has_answered:
            context.status = status_of(error)

    def interrupted(self, context: RequestContext, *, by_client: bool) -> None:
        context.result = CLIENT_GONE if by_client else Stopping.code

    def end(self, context: RequestContext, *, was_slow: bool = False) -> None:
        """Settle the request, however it ended. `was_slow`: the response had to wait for its client."""
        phase, now_s = context.phases.current, self.clock.now_s()
        context.phases.enter("settle", now_s)
        self.counters.requests_began(-1)
        output_tokens = counted_output_tokens(context, now_s - context.phases.began_s)
        is_used = self.records_usage or context.hold is not None
        used = self._settle(context, output_tokens, now_s) if is_used else None
        ended = ended_of(
            context, phase, output_tokens, now_s, self.clock.unix_s(), used if self.records_usage else None
        )
        self._observe(context, ended, now_s, was_slow=was_slow)
        context.phases.end(self.clock.now_s())
        self._pass_on(ended, context.prompt)

    def refused(
        self,
        endpoint: Endpoint,
        error: Exception,
        request_id: str = "",
        trace: Trace | None = None,
        tenant: Tenant = OPEN_TENANT,
    ) -> None:
        """Settle a request that was refused before its body was read. `tenant`: who sent it, if that is known. One that
        is its client's fault counts as a request, unless a quota refused it."""
        model = error.model if isinstance(error, NoReadyPod) else ""
        if self.charges is not None and isinstance(error, ClientError) and not isinstance(error, QuotaExceeded):
            self.charges.count_refused(tenant)
        self._end_unread(endpoint, code_of(error), tenant.name, request_id, model, trace, status_of(error), str(error))

    def abandoned(self, endpoint: Endpoint, tenant: str) -> None:
        self._end_unread(endpoint, CLIENT_GONE, tenant)

    def _end_unread(
        self,
        endpoint: Endpoint,
        result: str,
        tenant: str,
        request_id: str = "",
        model: str = "",
        trace: Trace | None = None,
        status: int = 0,
        error: str = "",
    ) -> None:
        ended = Ended(
            id=request_id,
            at_s=self.clock.unix_s(),
            model=model,
            endpoint=endpoint,
            result=result,
            status=status,
            error=error,
            tenant=tenant,
            trace_id=trace.trace_id if trace is not None else "",
            trace=trace if trace is not None and trace.is_recorded else None,
            is_read=False,
            used=UsedTokens() if self.records_usage and tenant else None,
        )
        self._pass_on(ended)

    def _pass_on(self, ended: Ended, prompt: PromptPrefix | None = None) -> None:
        for sink in self.sinks:
            sink(ended, prompt)

    def _settle(self, context: RequestContext, output_tokens: int | None, now_s: float) -> UsedTokens:
        """What the request used, in the quotas of its tenant, too."""
        hold = context.hold
        used = usage_of(context, output_tokens, self._unseen_tokens(context, now_s))
        if hold is not None and self.charges is not None:
            self.charges.end(hold, used, is_unknown=context.result == UpstreamTimeout.code or context.is_in_background)
        return used

    def used(self, context: RequestContext, now_s: float) -> UsedTokens:
        """What the request has used until now."""
        counted = counted_output_tokens(context, now_s - context.phases.began_s)
        return usage_of(context, counted, self._unseen_tokens(context, now_s))

    def _unseen_tokens(self, context: RequestContext, now_s: float) -> int:
        """About how many tokens a pod has generated of a response that was not seen, or of an unstreamed one that did
        not end: those of the time since the prefill, at the pod's pace. In the background, those that are expected."""
        request, candidate, api = context.request, context.candidate, context.request.endpoint.api
        if context.reader.output_tokens is not None or candidate is None or not api.generates:
            return 0
        if context.is_in_background:
            return self.state.output_lengths.charged_tokens(request, context.tenant.name)
        if not context.is_unseen and (context.result == "ok" or request.stream):
            return 0
        decoding_ms = (now_s - context.sent_s) * 1000 - expected_ttft_ms(candidate.cost)
        steps = max(decoding_ms, 0.0) / self._step_ms(context)
        return request.choices * min(int(steps), request.max_output_tokens or MAX_ANSWER_TOKENS)

    def _step_ms(self, context: RequestContext) -> float:
        """The time of a decode step on the pod that answers, with this request."""
        assert context.candidate is not None
        pod = context.candidate.pod
        there = self.state.ledger.inflight().get(pod.id, InFlight())
        step_ms = pod.speed.step_ms(there.requests + 1, there.context_tokens + context.prompt_tokens)
        return max(step_ms, MIN_STEP_MS)

    def _compare_tokens(self, context: RequestContext) -> None:
        """Compare the pod's count of prompt tokens with that of the router's reading."""
        reported, candidate = context.reader.prompt_tokens, context.candidate
        if reported is None or candidate is None or context.prompt is None or context.continued or context.tries != 1:
            return
        own = context.prompt.read_by(candidate.pod.front_end)
        if own is not None and candidate.pod.reads_alike(context.request.endpoint):
            for rule in context.compared:
                self.counters.tokens_compared(context.request.model, rule, are_equal=own.token_count == reported)

    def _observe(self, context: RequestContext, ended: Ended, now_s: float, *, was_slow: bool) -> None:
        state, decision, chosen = self.state, context.decision, ended.served
        is_read = context.prompt is not None and not context.continued and not context.request.fallback
        if chosen is not None and decision is not None and is_read and ended.ttft_ms is not None:
            ttft_ms = ended.ttft_ms - context.waited_s * 1000
            state.calibrator.compare_ttft(ended.model, decision, chosen, ttft_ms)
        if ttft := ttft_of_one_pod(context):
            pod, expected_ms, actual_ms = ttft
            state.breaker.first_token(pod, context.client, expected_ms, actual_ms, now_s)
        if context.result != "ok":
            return
        if context.compared:
            self._compare_tokens(context)
        pieces = context.reader.pieces if context.request.stream else 0  # about one a token
        if tokens := ceil((ended.output_tokens or pieces) / context.request.choices):
            state.output_lengths.answered(context.request.adapter or context.request.model, tokens, context.tenant.name)
        if self.queues is not None and not was_slow:
            self.queues.answered(context, now_s)


def ended_of(
    context: RequestContext,
    phase: str,
    output_tokens: int | None,
    now_s: float,
    unix_s: float,
    used: UsedTokens | None = None,
) -> Ended:
    """The request in numbers. `unix_s`: the time of day. `phases_s` also receives the current phase when it ends."""
    request, prompt, head, decision = context.request, context.prompt, context.head, context.decision
    elapsed_s, first_token_s, trace = now_s - context.phases.began_s, context.first_token_s, head.trace
    return Ended(  # in the order of its fields: as many keywords take ten times as long
        request.id,
        unix_s - elapsed_s,
        request.model,
        request.endpoint,
        context.result,
        context.status,
        context.error,
        request.tenant,
        trace.trace_id if trace is not None else "",
        trace if trace is not None and trace.is_recorded else None,
        phase,
        True,  # its body was read
        head.given_id,
        request.adapter,
        context.workload,
        decision.policy if decision is not None else "",
        context.tries,
        (len(prompt.tokens) if prompt else 0) or counted_prompt_tokens(context) or 0,
        output_tokens,
        context.cached_tokens,
        first_token_s * 1000 if request.stream and first_token_s is not None else None,
        context.ttft_limit_ms,
        elapsed_s * 1000,
        context.candidate,
        context.failures,
        context.continued,
        context.phases.taken_s,
        context.recorded,
        used,
        request.name,
        request.fallback,
    )


def usage_of(context: RequestContext, counted: int | None, unseen_tokens: int = 0) -> UsedTokens:
    """What a request used. One that no pod has received or that its pod refused used no tokens; attempts of a request
    that another pod served then are not counted. The output is the engine's number, `counted`, where the response is
    complete, and never less than what the client has received. `unseen_tokens`: what the pod has probably generated and
    not sent."""
    reader, served, estimated = context.reader, context.candidate, list[str]()
    has_failed = context.status == 0 and 0 < len(context.failures) - context.failed_before >= context.tries
    if served is None or context.status >= 400 or has_failed:
        return UsedTokens()
    reported, cached_tokens = counted_prompt_tokens(context), context.cached_tokens
    prompt = context.prompt_tokens if reported is None else reported
    if reported is None:
        estimated.append("prompt_tokens")
    if cached_tokens is None:
        estimated += ("cached_tokens", "computed_tokens")
    cached = min(prompt, served.cached_tokens if cached_tokens is None else cached_tokens)
    relayed = max(reader.tokens if isinstance(reader, TokenCountingReader) else 0, unseen_tokens)
    if counted is None or (context.result != "ok" and relayed > counted):
        counted = relayed
        estimated.append("output_tokens")
    return UsedTokens(prompt, cached, counted, tuple(estimated))
