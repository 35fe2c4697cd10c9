"""Who serves a request for a name where its target cannot, before the first byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

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
from router.request.hosted import Hosted, HostedModel, NotAsked

CANNOT_SERVE = (NoReadyPod, ContextTooLong)
"""Errors after which a fallback serves: not what is the client's or the tenant's own fault."""
Model: TypeAlias = tuple[str, str]
"""A base model and an adapter; "" without one."""


def may_fall_back(context: RequestContext, error: RouterError) -> bool:
    """Whether another model may serve a request that ended so. Pods may have received it. A client that sets its own
    limit chooses none: it could set one that every pod misses."""
    if isinstance(error, Overloaded):
        return context.ttft_limit_ms is not None
    if isinstance(error, UpstreamTimeout):
        return False
    if isinstance(error, UpstreamError):
        return context.repeatable or not context.pods_failed
    return isinstance(error, CANNOT_SERVE)


def may_wait(context: RequestContext, error: RouterError) -> bool:
    """Whether a request may wait for a pod again, because no pod has received it."""
    is_unserved = isinstance(error, NoReadyPod | ConnectFailed) and not context.pods_failed
    return is_unserved and context.held_until_s > 0 and not context.is_picked


def fallbacks_of(
    context: RequestContext, fleet: Fleet, hosted: Hosted, pods_failed: int, now_s: float
) -> Iterator[tuple[int, Model | HostedModel | NotAsked]]:
    """The models and providers that can serve the request now, and why other providers are not asked, each with its
    number from 1 in the list. `pods_failed`: a request that may be the cause of failures of pods reaches no more of
    them. Whether budgets allow a provider is not known yet."""
    if context.stored_pod or context.is_picked:
        return
    for number, name in enumerate(context.request.fallbacks, 1):
        if (one := hosted.get(name)) is not None:
            yield number, one.refusal(context, now_s) or one
        elif pods_failed < MAX_FAILED_ATTEMPTS:
            model = fleet.resolve(name)
            if model is not None and context.tenant.may_use(*model) and ready_pods(fleet.snapshot, name).can_serve:
                yield number, model


def with_reasons(error: RouterError, not_asked: Sequence[NotAsked]) -> RouterError:
    """The error that says, too, why providers did not serve the request: 503 where pods failed or are unknown."""
    if not not_asked:
        return error
    if isinstance(error, UpstreamError):
        error = NoReadyPod(str(error))
    why = [one.why for one in not_asked]
    if error.without_pods:
        error.without_pods = " ".join([error.without_pods, *why])
    error.args = (" ".join([f"{str(error).rstrip('.')}.", *why]),)
    return error
