"""What a request used, for bills and quotas."""

from __future__ import annotations

from router.observe.ended import UsedTokens
from router.observe.receipts import Outcome
from router.request.context import RequestContext
from router.request.response_reader import TokenCountingReader


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
