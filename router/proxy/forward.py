"""One request, from its arrival to the last byte of its response.

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

A request about tokens ends after `fingerprint` where the pods have the same as the router.

Each phase is one method of that name: `admit` in `api`, three in `proxy/request_decision.py`, `attempt` and `relay` in
`proxy/attempt.py`. Request bodies are parsed and error responses written in `api`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from router.decision import Split
from router.errors import RouterError, Stopping, shortened
from router.observe.log import RequestLine
from router.observe.receipts import CLIENT_GONE, Outcome
from router.observe.tracing import EndedRequest
from router.observe.unrouted_requests import MAX_ERROR_CHARACTERS
from router.proxy.attempt import Attempts
from router.proxy.dependencies import ProxyDependencies
from router.proxy.large_edits import UuidRemoval
from router.proxy.relay import Downstream
from router.proxy.request_context import RequestContext, outcome_of, ttft_of_one_pod
from router.proxy.request_decision import RequestDecisions
from router.proxy.request_queues import RequestQueues
from router.proxy.token_answers import ABOUT_TOKENS
from router.proxy.websockets import WebSocketClient, WebSocketTunnels


class Forwarder:
    """Serves requests."""

    def __init__(self, needs: ProxyDependencies) -> None:
        self._decisions = RequestDecisions(needs)
        self._attempts = Attempts(needs)
        self._websockets = WebSocketTunnels(needs)
        self._uuids = None if needs.settings.trusts_uuids else UuidRemoval()
        self._queues = RequestQueues(needs.queue, needs, self._decisions) if needs.queue else None
        self._metrics = needs.metrics
        self._calibrator = needs.calibrator
        self._breaker = needs.breaker
        self._journal = needs.journal
        self._quotas = needs.quotas
        self._usage = needs.usage
        self._output_lengths = needs.output_lengths
        self._status_of = needs.status_of
        self.request_log = needs.request_log
        self.preview = self._decisions.preview
        self.responses = needs.responses

    async def forward_websocket(self, context: RequestContext, client: WebSocketClient) -> None:
        """Serve one websocket, until it is closed. Raises `RouterError` where none was begun."""
        await self._settled(self._serve_websocket(context, client), context, client)

    async def forward(self, context: RequestContext, client: Downstream) -> None:
        """Serve one request. Raises `RouterError` where no response could be sent, or not to its end."""
        await self._settled(self._serve(context, client), context, client)

    async def _serve_websocket(self, context: RequestContext, client: WebSocketClient) -> None:
        await self._begin(context)
        match = await self._decisions.match(context)
        context.decision = self._decisions.decide(context, match)
        await self._websockets.serve(context, client)

    async def _serve(self, context: RequestContext, client: Downstream) -> None:
        await self._begin(context)
        context.stored_pod = context.stored_pod or await self._decisions.stored_pod(
            context.request, context.tenant.name
        )
        context.prompt = await self._decisions.fingerprint(context)
        if context.request.endpoint in ABOUT_TOKENS and await self._answer_itself(context, client):
            return
        if self._uuids is not None and (body := await self._uuids.body_of(context)) is not context.request.body:
            context.request = replace(context.request, body=body)
        match = await self._decisions.match(context)
        context.decision = self._decisions.decide(context, match)
        if context.hold is not None:
            expected = self._output_lengths.expected_tokens(context.request, context.tenant.name)
            await self._quotas.charge(context, expected)
        if self._queues is None or context.prompt is None:
            await self._attempts.attempt_in_order(context, client)
            return
        await self._queues.wait_for_place(context)
        await self._attempts.attempt_in_order(context, client)
        if context.result == "ok" and not client.was_slow:
            self._queues.answered(context)

    async def _begin(self, context: RequestContext) -> None:
        """Count one request more of its tenant. Raises `QuotaExceeded`."""
        if self._usage is not None:
            self._usage.begin(context)
            if context.tenant.quotas:
                await self._quotas.begin(context)

    async def _settled(
        self, serving: Coroutine[Any, Any, None], context: RequestContext, client: Downstream | WebSocketClient
    ) -> None:
        """Count the request, and settle it however it ends. Raises what `serving` does."""
        self._metrics.in_flight.value += 1
        try:
            await serving
        except asyncio.CancelledError:
            context.result = CLIENT_GONE if client.disconnected else Stopping.code
            if client.disconnected:
                self._metrics.cancellations.labels(context.phases.current).inc()
            raise
        except RouterError as error:
            context.result, context.error = error.code, str(error)
            if not client.started:
                context.status = self._status_of(error)
            raise
        finally:
            self.settle(context)

    async def _answer_itself(self, context: RequestContext, client: Downstream) -> bool:
        """Answer a request about tokens, if a pod was shown to have the same; else prepare it for a pod."""
        pieces, context.prompt = self._decisions.answer_about_tokens(context), None
        if pieces is None:
            return False
        context.phases.enter("relay")
        context.status, context.result = 200, "ok"
        client.start(200, [(b"content-type", b"application/json"), (b"x-request-id", context.request.id.encode())])
        for piece in pieces:
            if not client.put(piece):
                await client.ready()
            await asyncio.sleep(0)
        client.finish()
        return True

    def settle(self, context: RequestContext) -> None:
        """Count and log the request, and compare predicted with reported values."""
        context.phases.enter("settle")
        metrics, ended = self._metrics, outcome_of(context)
        metrics.in_flight.value -= 1
        if (recorded := context.recorded) is not None:
            metrics.observe_request(ended, context.workload, recorded.policy.name)
            metrics.by_class.settle(ended, recorded.scene, recorded.policy, context.prompt)
        else:
            metrics.observe_request(ended)
        if self._usage is not None:
            self._usage.end(context, ended)
        self._compare(context, ended)
        if context.result == "ok" and (tokens := context.answer_tokens):
            tenant = context.tenant.name if context.hold is not None else ""
            self._output_lengths.answered(context.request.adapter or context.request.model, tokens, tenant)
        context.phases.end()
        metrics.phase_s.add(ended.phases_s)
        self._journal.settle(ended, context.recorded, context.decision, context.prompt)
        if (trace := context.inbound.trace) is not None and trace.sink is not None:
            trace.sink.add(EndedRequest(trace, _line(context, ended), ended))
        if self.request_log is not None:
            self.request_log.log(_line(context, ended))

    def _compare(self, context: RequestContext, ended: Outcome) -> None:
        """Predicted time to first token with the actual one."""
        decision, chosen = context.decision, ended.served
        if chosen is not None and decision is not None and context.prompt is not None and ended.ttft_ms is not None:
            self._calibrator.compare_ttft(ended.model, decision, chosen, ended.ttft_ms - context.waited_s * 1000)
        if ttft := ttft_of_one_pod(context):
            pod, expected_ms, actual_ms = ttft
            self._breaker.first_token(pod, context.client, expected_ms, actual_ms, time.monotonic())


def _line(context: RequestContext, ended: Outcome) -> RequestLine:
    """What is logged of a request."""
    line = RequestLine(  # a call with more than 15 keywords takes twice as long
        id=ended.id,
        client_request_id=context.inbound.given_id,
        endpoint=ended.endpoint,
        model=ended.model,
        pod=ended.served.pod.id if ended.served is not None else None,
        policy=context.decision.policy if context.decision is not None else None,
        workload=context.workload,
        status=context.status or None,
        result=ended.result,
        error=shortened(context.error, MAX_ERROR_CHARACTERS) if context.error else None,
        tries=context.tries if context.tries > 1 else None,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        ttft_ms=None if ended.ttft_ms is None else round(ended.ttft_ms, 1),
        e2e_ms=round(ended.e2e_ms, 1),
    )
    line.output_tokens, line.trace_id = ended.output_tokens, ended.trace_id
    if ended.served is not None and isinstance(ended.served.plan, Split):
        line.prefill_pod = ended.served.plan.prefill.id
    return line
