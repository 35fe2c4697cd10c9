"""Finds what a request used when it has ended, and passes it to quotas, metrics and the file of usage."""

from __future__ import annotations

from collections.abc import Callable

from router.observe.class_metrics import ClassMetrics
from router.observe.receipts import Outcome
from router.observe.used_tokens import UsageWriter, UsedTokens
from router.proxy.quota_admission import QuotaAdmission
from router.proxy.request_context import RequestContext
from router.proxy.response_reader import TokenCountingReader


class UsageRecords:
    """Records the use of each request. `writer`: of the file, if there is one."""

    def __init__(self, quotas: QuotaAdmission, metrics: ClassMetrics, writer: UsageWriter | None = None) -> None:
        self._quotas = quotas
        self._add: Callable[[UsedTokens], None] = metrics.observe_usage
        self._writer = writer

    def begin(self, context: RequestContext) -> None:
        """Count the tokens of a stream as they pass: its end, with the engine's count, may never come."""
        if context.request.stream:
            context.reader = TokenCountingReader(context.reader.format)

    def end(self, context: RequestContext, ended: Outcome) -> None:
        """Record what the request used."""
        used = usage_of(context, ended)
        if context.hold is not None:
            output_tokens = None if context.is_in_background else used.output_tokens
            self._quotas.end(context.hold, used.computed_tokens, output_tokens)
        self._add(used)
        if self._writer is not None:
            self._writer.write(used)


def usage_of(context: RequestContext, ended: Outcome) -> UsedTokens:
    """What a request used. One that no pod has received or that its pod refused used no tokens; attempts of a request
    that another pod served then are not counted."""
    request, reader, estimated = context.request, context.reader, []
    prompt = cached = output = 0
    if ended.served is not None and context.status < 400 and _was_received(context):
        reported, cached_tokens, counted = reader.prompt_tokens, ended.cached_tokens, ended.output_tokens
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


def _was_received(context: RequestContext) -> bool:
    """Whether the last pod may have computed the request: not if the attempt failed before its response began."""
    return context.status > 0 or not context.failures or len(context.failures) < context.tries
