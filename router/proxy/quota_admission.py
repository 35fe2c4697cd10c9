"""Counts requests against the quotas of their tenants, and refuses those that do not fit.

A request is counted when it begins and when it is decided; what it really cost corrects that when it ends. It waits
only where another process has what it needs of a limit (`feeds/quota_feed.py`): for a round trip, or half a second if
that process or Redis hangs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from router.admission.quotas import Hold, Quotas, Short
from router.errors import QuotaExceeded
from router.proxy.rate_limit_headers import limit_headers, refusal_headers
from router.proxy.request_context import RequestContext

MAX_EXCHANGES = 2
"""Exchanges of shares that a request waits for."""


class QuotaAdmission:
    """`next_exchange` waits until shares have been exchanged with other processes; None without any. `on_refusal` is
    called with the tenant and the limit."""

    def __init__(
        self,
        quotas: Quotas | None = None,
        next_exchange: Callable[[], Awaitable[None]] | None = None,
        on_refusal: Callable[[str, str], None] = lambda _tenant, _limit: None,
    ) -> None:
        self._quotas = quotas or Quotas()
        self._next_exchange = next_exchange
        self._on_refusal = on_refusal

    async def begin(self, context: RequestContext) -> None:
        """Count one request more. Raises `QuotaExceeded`."""
        found = self._begin(context)
        for _ in range(MAX_EXCHANGES):
            if isinstance(found, Hold):
                break
            await self._exchange(context, found)
            found = self._begin(context)
        if isinstance(found, Short):
            raise self._refusal(context, found)
        context.hold = found

    def _begin(self, context: RequestContext) -> Hold | Short:
        tenant, request = context.tenant, context.request
        return self._quotas.begin(tenant.name, tenant.quotas, request.model, request.adapter, time.monotonic())

    async def charge(self, context: RequestContext, output: int) -> None:
        """Count the tokens that the decided request will probably cost. `output`: expected tokens of the answer. Raises
        `QuotaExceeded`."""
        hold, decision, request = context.hold, context.decision, context.request
        assert hold is not None and decision is not None
        uncached = max(0, context.prompt_tokens - decision.candidates[0].cached_tokens)
        now_s = time.monotonic()
        short = self._quotas.charge(hold, uncached, output, now_s)
        for _ in range(MAX_EXCHANGES):
            if short is None:
                break
            await self._exchange(context, short)
            short = self._quotas.charge(hold, uncached, output, time.monotonic())
        if short is not None:
            self._quotas.refuse(hold)
            raise self._refusal(context, short)
        context.limit_headers = limit_headers(request.endpoint, hold.applied, now_s, time.time())

    def end(self, hold: Hold, computed_tokens: int, output_tokens: int | None) -> None:
        """Replace the expected by the real cost; None: unknown."""
        self._quotas.end(hold, computed_tokens, output_tokens, time.monotonic())

    async def _exchange(self, context: RequestContext, short: Short) -> None:
        """Wait for shares if that may help. Raises `QuotaExceeded`."""
        if not short.may_fit or self._next_exchange is None:
            if context.hold is not None:
                self._quotas.refuse(context.hold)
            raise self._refusal(context, short)
        await self._next_exchange()

    def _refusal(self, context: RequestContext, short: Short) -> QuotaExceeded:
        self._on_refusal(context.tenant.name, short.dimension.name.lower())
        headers = []
        if short.applied is not None:
            headers = refusal_headers(context.request.endpoint, short.applied, time.monotonic(), time.time())
        limit = f"{short.limit} {short.dimension.value}, {short.remaining} left, {short.amount} needed"
        if short.retry_after_s is None:
            message = f"The request is larger than the limit of your account: {limit}. It can never be served."
        else:
            message = f"Rate limit of your account reached: {limit}. Retry in {short.retry_after_s:.3f} s."
        return QuotaExceeded(message, is_tokens=short.is_tokens, retry_after_s=short.retry_after_s, headers=headers)
