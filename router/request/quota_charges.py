"""Counts requests against the quotas of their tenants, and refuses those that do not fit.

A request is counted when it begins and when it is decided; what it really cost corrects that when it ends. It waits
only where another process has what it needs of a limit (`feeds/shared_rows.py`): for a round trip, or half a second if
that process or Redis hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple, TypeAlias, TypeVar

from router.admission.meter import KEPT_S, Meter, in_units
from router.admission.quotas import Applied, Hold, Quotas, Short
from router.admission.tenant import Tenant
from router.apis.api import Conventions
from router.config.provider_schema import Provider
from router.endpoints import Endpoint
from router.errors import QuotaExceeded
from router.observe.ended import UsedTokens
from router.request.context import RequestContext
from router.request.effects import Effects
from router.request.fleet_state import Clock
from router.request.hosted import NotAsked, most_money
from router.request.inbound import HeaderList

T = TypeVar("T")
MAX_EXCHANGES = 16
"""Exchanges of shares that a request waits for: others may come meanwhile, and take what it has asked for."""
MAX_WAIT_S = 1.0
"""No further exchange is waited for after this time: Redis is slow."""


class Spending(NamedTuple):
    """What was counted for one request, in that second."""

    meters: Sequence[Meter]
    second: int
    amount: int


@dataclass(slots=True, eq=False)
class QuotaCharges:
    """`has_others`: whether other processes enforce the same quotas. `on_refusal`: called with tenant and limit."""

    quotas: Quotas
    clock: Clock
    has_others: bool = False
    on_refusal: Callable[[str, str], None] = lambda _tenant, _limit: None

    def receive(self, tenant: Tenant, endpoint: Endpoint) -> Hold | QuotaExceeded:
        """Count a request as concurrent while its body arrives, or return why it needs not be read."""
        found = self.quotas.receive(tenant.name, tenant.quotas, self.clock.now_s())
        return found if isinstance(found, Hold) else self._refusal(tenant, endpoint, found)

    def has_arrived(self, arriving: Hold) -> None:
        """Count it no more; `begin` may follow. Idempotent."""
        self.quotas.end(arriving, 0, 0, self.clock.now_s())

    async def begin(self, context: RequestContext, do: Effects) -> None:
        """Count one request more. Raises `QuotaExceeded`."""
        found = self._begun(context)
        if isinstance(found, Short):
            found = await self._fitting(context, found, lambda: self._begun(context), do)
        context.hold = found

    def _begun(self, context: RequestContext) -> Hold | Short:
        tenant, request = context.tenant, context.request
        names = request.model, request.adapter, self.clock.now_s(), request.name
        return self.quotas.begin(tenant.name, tenant.quotas, *names)

    def withdraw(self, context: RequestContext) -> None:
        """Count a request no longer, before it begins again with another model."""
        if context.hold is not None:
            self.quotas.withdraw(context.hold, self.clock.now_s())
            context.hold = None

    async def charge(self, context: RequestContext, output: int, do: Effects) -> None:
        """Count what the decided request will probably cost. `output`: of the answer. Raises `QuotaExceeded`."""
        hold, decision, now_s = context.hold, context.decision, self.clock.now_s()
        assert hold is not None and decision is not None
        uncached = max(0, context.prompt_tokens - decision.candidates[0].cached_tokens)
        if (short := self.quotas.charge(hold, uncached, output, now_s)) is not None:
            await self._fitting(
                context, short, lambda: self.quotas.charge(hold, uncached, output, self.clock.now_s()), do
            )
        context.limit_headers = limit_headers(context.request.endpoint, hold.applied, now_s, self.clock.unix_s())

    async def spend(self, context: RequestContext, provider: Provider, do: Effects) -> Spending | NotAsked:
        """Count the most that the request can cost at a provider, in its budget and that of the tenant."""
        tenant, request = context.tenant, context.request
        meters = self.quotas.money_of(provider.pod.id, provider.quotas, provider.name)
        meters = [*meters, *self.quotas.money_of(tenant.name, tenant.quotas, provider.name, request.name)]
        amount = in_units(most_money(provider, context))
        short = self.quotas.spend(meters, amount, self.clock.now_s())
        if short is not None:
            short = await self._waited(short, lambda: self.quotas.spend(meters, amount, self.clock.now_s()), do)
        if short is None:
            return Spending(meters, int(self.clock.now_s()), amount)
        is_own = short.meter == meters[0].key
        code, whose = ("budget", "its budget") if is_own else ("tenant_budget", "your budget for providers")
        why = f"Provider {provider.name} is not asked, because {whose} of this hour is used."
        return NotAsked(provider.name, code, why)

    def spent(self, spending: Spending, money: float | None) -> None:
        """Replace the most by what a request has cost; None: unknown."""
        if money is not None:
            more = in_units(money) - spending.amount
            self.quotas.spent(spending.meters, spending.second, more, self.clock.now_s())

    async def _fitting(self, context: RequestContext, short: Short, count: Callable[[], T | Short], do: Effects) -> T:
        """What `count` returns once a request fits that is `short` of something. Raises `QuotaExceeded`."""
        found = await self._waited(short, count, do)
        if isinstance(found, Short):
            if context.hold is not None:
                self.quotas.end(context.hold, 0, 0, self.clock.now_s())
            raise self._refusal(context.tenant, context.request.endpoint, found)
        return found

    async def _waited(self, short: Short, count: Callable[[], T | Short], do: Effects) -> T | Short:
        """What `count` returns once a request fits that is `short` of something, or that waits for nothing more."""
        found: T | Short = short
        until_s = self.clock.now_s() + MAX_WAIT_S
        for _ in range(MAX_EXCHANGES):
            if not isinstance(found, Short) or not (found.may_fit and self.has_others):
                break
            if self.clock.now_s() >= until_s:
                break
            await do.quota_sync()
            found = count()
        return found

    def count_refused(self, tenant: Tenant) -> None:
        """Count a request that its client can only send again and again, such as a malformed one."""
        if tenant.quotas:
            self.quotas.count(tenant.name, tenant.quotas, self.clock.now_s())

    def end(self, hold: Hold, used: UsedTokens, *, is_unknown: bool) -> None:
        """Replace the expected by the real cost. `is_unknown`: the pod may have computed what was expected."""
        prompt_tokens, output_tokens = used.computed_tokens, used.output_tokens
        if is_unknown:
            prompt_tokens = max(prompt_tokens, hold.prompt_tokens)
            output_tokens = max(output_tokens, hold.output_tokens)
        self.quotas.end(hold, prompt_tokens, output_tokens, self.clock.now_s())

    def _refusal(self, tenant: Tenant, endpoint: Endpoint, short: Short) -> QuotaExceeded:
        self.on_refusal(tenant.name, short.dimension.name.lower())
        headers = []
        if short.applied is not None:
            now_s, unix_s = self.clock.now_s(), self.clock.unix_s()
            headers = limit_headers(endpoint, short.applied, now_s, unix_s, is_refused=True)
        limit = f"{short.limit} {short.dimension.value}, {short.remaining} left, {short.amount} needed"
        if short.retry_after_s is None:
            message = f"The request is larger than the limit of your account: {limit}. It can never be served."
        else:
            message = f"Rate limit of your account reached: {limit}. Retry in {short.retry_after_s:.3f} s."
        return QuotaExceeded(message, is_tokens=short.is_tokens, retry_after_s=short.retry_after_s, headers=headers)


class LimitLine(NamedTuple):
    meter: Meter
    limit: tuple[bytes, bytes]
    remaining: bytes
    reset: bytes


Lines: TypeAlias = Sequence[Sequence[LimitLine]]
"""The limits that may be reported under each name that an API has for limits."""


# --- headers ---

# OpenAI has one limit of tokens: the one with the smaller part left is reported, of uncached prompt tokens and of
# output tokens. Times until a limit is whole again are durations there, and times of day in Anthropic's API.


def limit_headers(
    endpoint: Endpoint, applied: Applied, now_s: float, unix_s: float, *, is_refused: bool = False
) -> HeaderList:
    """Under each name, the limit with the smallest part left. A request that was just counted is in the window until
    all limits are whole again, unlike one that was refused. `now_s`: of the clock of the meters; `unix_s`: the same
    time of day."""
    conventions, second, found = endpoint.api.conventions, int(now_s), list[tuple[bytes, bytes]]()
    for group in _lines(applied, conventions):
        least = inf
        for line in group:
            meter = line[0]
            others = meter.others
            left = meter.limit - meter.own.total - (others.total and others.at(second))
            if (part := left / meter.limit) < least:
                least, least_left, tightest = part, left, line
        meter, limit, remaining, reset = tightest
        whole_s = meter.reset_s(now_s) if is_refused else KEPT_S
        whole = _timestamp(ceil(unix_s + whole_s)) if conventions.resets_at_time else _duration(whole_s)
        found += limit, (remaining, b"%d" % max(least_left, 0)), (reset, whole)
    return found


def _lines(applied: Applied, conventions: Conventions) -> Lines:
    """Built once for each tenant, model and provider's conventions."""
    known: Lines | None = applied.header_lines.get(conventions)
    if known is None:
        groups: dict[bytes, Sequence[Meter]] = {of: getattr(applied, name) for of, name in conventions.limits.items()}
        known = applied.header_lines[conventions] = [
            [LimitLine(meter, (limit, b"%d" % meter.limit), remaining, reset) for meter in meters]
            for of, meters in groups.items()
            for limit, remaining, reset in [conventions.limit_headers(of)]
            if meters
        ]
    return known


@lru_cache(4)
def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: `6m0s`, `1.5s`, `0s`."""
    minutes, rest = divmod(ceil(seconds * 1000) / 1000, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{int(minutes)}m{text}" if minutes else text).encode()


@lru_cache(4)
def _timestamp(unix_s: int) -> bytes:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
