"""Who serves a request for a name where its target cannot, before the first byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.errors import (
    ConnectFailed,
    ContextTooLong,
    NoReadyPod,
    Overloaded,
    RouterError,
    UpstreamError,
    UpstreamTimeout,
)
from router.fleet.fleet import Fleet
from router.policy.eligible import ready_pods
from router.policy.retry import MAX_FAILED_ATTEMPTS
from router.request.context import RequestContext
from router.request.hosted import Hosted, HostedModel, Refusal

CANNOT_SERVE = (NoReadyPod, ContextTooLong)
"""Errors after which a fallback serves: not what is the client's or the tenant's own fault."""


def may_fall_back(context: RequestContext, error: RouterError) -> bool:
    """Whether another model may serve a request that ended so. Pods may have received it. A client that sets its own
    limit chooses none: it could set one that every pod misses."""
    if isinstance(error, Overloaded):
        return context.ttft_limit_ms is not None
    if isinstance(error, UpstreamTimeout) or not isinstance(error, UpstreamError):
        return isinstance(error, CANNOT_SERVE)
    return context.repeatable or not received(context)


def received(context: RequestContext) -> int:
    """How many pods may have received the request and failed."""
    return sum(failure.error != ConnectFailed.code for failure in context.failures)


def usable(
    context: RequestContext, fleet: Fleet, hosted: Hosted, pods_received: int, now_s: float
) -> Iterator[tuple[int, tuple[str, str] | HostedModel]]:
    """The fallbacks that can serve the request now, a provider or base model and adapter, each with its number from 1
    in the list. `pods_received`: see `received`; a request that may be the cause of failures of pods reaches no more
    of them. Whether budgets allow a provider is not known yet."""
    if context.stored_pod or context.is_picked:
        return
    for number, name in enumerate(context.request.fallbacks, 1):
        if (one := hosted.get(name)) is not None:
            if one.refusal(context, now_s) is None:
                yield number, one
        elif pods_received < MAX_FAILED_ATTEMPTS:
            model, found = fleet.resolve(name), ready_pods(fleet.snapshot, name)
            if model is not None and context.tenant.may_use(*model) and (found.direct or found.prefill):
                yield number, model


def refused(context: RequestContext, names: Sequence[str], hosted: Hosted, now_s: float) -> list[Refusal]:
    """Why those of these fallbacks that are providers are not asked."""
    found = (hosted[name].refusal(context, now_s) for name in names if name in hosted)
    return [one for one in found if one is not None]


def with_reasons(error: RouterError, refusals: Sequence[Refusal]) -> RouterError:
    """The error that says, too, why providers did not serve the request: 503 where pods failed."""
    if not refusals:
        return error
    if isinstance(error, UpstreamError):
        error = NoReadyPod(str(error))
    error.args = (" ".join([f"{str(error).rstrip('.')}.", *(one.why for one in refusals)]),)
    return error
