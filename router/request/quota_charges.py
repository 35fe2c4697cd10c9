"""Counts requests against the quotas of their tenants, and refuses those that do not fit.

A request is counted when it begins and when it is decided; what it really cost corrects that when it ends. It waits
only where another process has what it needs of a limit (`feeds/quota_feed.py`): for a round trip, or half a second if
that process or Redis hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from router.admission.quotas import Hold, Quotas, Short
from router.admission.tenant import Tenant
from router.endpoints import Endpoint
from router.errors import QuotaExceeded
from router.observe.ended import UsedTokens
from router.request.clock import Clock
from router.request.context import RequestContext
from router.request.preparation_steps import QuotaExchange, Step
from router.request.rate_limit_headers import limit_headers, refusal_headers

MAX_EXCHANGES = 2
"""Exchanges of shares that a request waits for."""


class QuotaCharges:
    """Charges requests. `has_others`: whether other processes enforce the same quotas. `on_refusal` is called with the
    tenant and the limit."""

    def __init__(
        self,
        quotas: Quotas,
        clock: Clock,
        *,
        has_others: bool = False,
        on_refusal: Callable[[str, str], None] = lambda _tenant, _limit: None,
    ) -> None:
        self._quotas = quotas
        self._clock = clock
        self._has_others = has_others
        self._on_refusal = on_refusal

    def spent(self, tenant: Tenant, endpoint: Endpoint) -> QuotaExceeded | None:
        """Why none of a tenant's requests needs to be read now; None if one does."""
        short = self._quotas.spent(tenant.name, tenant.quotas, self._clock.now_s())
        return None if short is None else self._refusal(tenant, endpoint, short)

    def begin(self, context: RequestContext) -> Generator[Step, None, None]:
        """Count one request more. Raises `QuotaExceeded`."""
        found = self._begin(context)
        for _ in range(MAX_EXCHANGES):
            if isinstance(found, Hold):
                break
            self._refuse_unless_shared(context, found)
            yield QuotaExchange()
            found = self._begin(context)
        if isinstance(found, Short):
            raise self._refusal(context.tenant, context.request.endpoint, found)
        context.hold = found

    def _begin(self, context: RequestContext) -> Hold | Short:
        tenant, request = context.tenant, context.request
        return self._quotas.begin(tenant.name, tenant.quotas, request.model, request.adapter, self._clock.now_s())

    def charge(self, context: RequestContext, output: int) -> Generator[Step, None, None]:
        """Count the tokens that the decided request will probably cost. `output`: expected tokens of the answer. Raises
        `QuotaExceeded`."""
        hold, decision, request = context.hold, context.decision, context.request
        assert hold is not None and decision is not None
        uncached = max(0, context.prompt_tokens - decision.candidates[0].cached_tokens)
        now_s = self._clock.now_s()
        short = self._quotas.charge(hold, uncached, output, now_s)
        for _ in range(MAX_EXCHANGES):
            if short is None:
                break
            self._refuse_unless_shared(context, short)
            yield QuotaExchange()
            short = self._quotas.charge(hold, uncached, output, self._clock.now_s())
        if short is not None:
            self._quotas.refuse(hold)
            raise self._refusal(context.tenant, context.request.endpoint, short)
        context.limit_headers = limit_headers(request.endpoint, hold.applied, now_s, self._clock.unix_s())

    def end(self, hold: Hold, used: UsedTokens, *, is_in_background: bool) -> None:
        """Replace the expected by the real cost. The output of a response in the background is unknown."""
        output_tokens = None if is_in_background else used.output_tokens
        self._quotas.end(hold, used.computed_tokens, output_tokens, self._clock.now_s())

    def _refuse_unless_shared(self, context: RequestContext, short: Short) -> None:
        """Raise `QuotaExceeded` unless another process may have what the request needs."""
        if short.may_fit and self._has_others:
            return
        if context.hold is not None:
            self._quotas.refuse(context.hold)
        raise self._refusal(context.tenant, context.request.endpoint, short)

    def _refusal(self, tenant: Tenant, endpoint: Endpoint, short: Short) -> QuotaExceeded:
        self._on_refusal(tenant.name, short.dimension.name.lower())
        headers = []
        if short.applied is not None:
            headers = refusal_headers(endpoint, short.applied, self._clock.now_s(), self._clock.unix_s())
        limit = f"{short.limit} {short.dimension.value}, {short.remaining} left, {short.amount} needed"
        if short.retry_after_s is None:
            message = f"The request is larger than the limit of your account: {limit}. It can never be served."
        else:
            message = f"Rate limit of your account reached: {limit}. Retry in {short.retry_after_s:.3f} s."
        return QuotaExceeded(message, is_tokens=short.is_tokens, retry_after_s=short.retry_after_s, headers=headers)
