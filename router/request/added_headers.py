"""Which headers does the router add to a response of a pod?"""

from __future__ import annotations

from router.decision import Split
from router.request.context import RequestContext
from router.request.inbound import HeaderList


def added_headers(context: RequestContext, *, names_pods: bool) -> HeaderList:
    """The id and limits of a request; with `names_pods`, also where it was sent and what was expected there."""
    headers = [(b"x-request-id", context.request.id.encode()), *context.limit_headers]
    if context.inbound.trace is not None:
        headers.append(context.inbound.trace.context())
    if not names_pods or context.decision is None or context.candidate is None:
        return headers
    plan = context.candidate.plan
    headers += [
        (b"x-warmroute-pod", plan.pod.id.encode()),
        (b"x-warmroute-policy", context.decision.policy.encode()),
        (b"x-warmroute-cached-tokens", b"%d" % context.candidate.cached_tokens),
    ]
    if isinstance(plan, Split):
        headers.append((b"x-warmroute-prefill-pod", plan.prefill.id.encode()))
    if reason := context.unmatched:
        headers.append((b"x-warmroute-match", b"none; reason=" + reason.encode()))
    return headers
