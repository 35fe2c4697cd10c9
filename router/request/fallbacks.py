"""Who serves a request for a name where its target cannot, before the first byte."""

from __future__ import annotations

from collections.abc import Iterator

from router.errors import (
    ConnectFailed,
    ContextTooLong,
    NoReadyPod,
    Overloaded,
    RouterError,
    UnknownModel,
    UpstreamError,
    UpstreamTimeout,
)
from router.fleet.fleet import Fleet
from router.policy.eligible import ready_pods
from router.policy.retry import MAX_FAILED_ATTEMPTS
from router.request.context import RequestContext

CANNOT_SERVE = (NoReadyPod, UnknownModel, ContextTooLong, Overloaded)
"""Errors after which a fallback serves: not what is the client's or the tenant's own fault."""


def may_fall_back(context: RequestContext, error: RouterError) -> bool:
    """Whether another model may serve a request that ended so. Pods may have received it."""
    if isinstance(error, UpstreamTimeout) or not isinstance(error, UpstreamError):
        return isinstance(error, CANNOT_SERVE)
    return context.repeatable or not received(context)


def received(context: RequestContext) -> int:
    """How many pods may have received the request and failed."""
    return sum(failure.error != ConnectFailed.code for failure in context.failures)


def usable(context: RequestContext, fleet: Fleet, pods_received: int) -> Iterator[tuple[int, tuple[str, str]]]:
    """The fallbacks that can serve the request now, base model and adapter, each with its number from 1 in the list.
    `pods_received`: see `received`."""
    if context.stored_pod or context.is_picked or pods_received >= MAX_FAILED_ATTEMPTS:
        return
    for number, name in enumerate(context.request.fallbacks, 1):
        model, found = fleet.resolve(name), ready_pods(fleet.snapshot, name)
        if model is not None and context.tenant.may_use(*model) and (found.direct or found.prefill):
            yield number, model
