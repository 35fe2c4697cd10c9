"""How much a tenant may use in a minute, and at once; money in an hour.

A request is counted in three steps. It begins: one request more, unless a limit is reached. It is decided: the tokens
that its pod will have to compute, as predicted, and those that it will probably generate, if they fit. It ends: what it
really cost replaces what was expected. A request whose tokens do not fit stays counted: its prompt has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from pydantic import ConfigDict, Field

from router.admission.meter import MONEY_UNIT, Dimension, Meter
from router.admission.sharing import MeterSharing

MAX_MONEY = 1e6
"""More money than any budget for an hour."""
_Limit: TypeAlias = Annotated[int, Field(gt=0, le=10**12)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant; None: no limit. A cached prompt token costs nothing."""

    model: str = ""
    """The model or adapter that it is for; empty: for all together."""
    requests_per_minute: _Limit = None
    uncached_prompt_tokens_per_minute: _Limit = None
    output_tokens_per_minute: _Limit = None
    concurrent_requests: _Limit = None
    money_per_hour: Annotated[float, Field(gt=0, le=MAX_MONEY)] | None = None
    """For providers, in `admin.currency`."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def limits(self) -> dict[Dimension, int]:
        found = {
            Dimension.REQUESTS: self.requests_per_minute,
            Dimension.PROMPT: self.uncached_prompt_tokens_per_minute,
            Dimension.OUTPUT: self.output_tokens_per_minute,
            Dimension.CONCURRENT: self.concurrent_requests,
            Dimension.MONEY: None if self.money_per_hour is None else int(self.money_per_hour / MONEY_UNIT),
        }
        return {dimension: limit for dimension, limit in found.items() if limit is not None}


class Short(msgspec.Struct, frozen=True):
    """A request that does not fit: the limit, and when it would fit (None: never). `may_fit`: another process may have
    what it needs, so that it is worth waiting for the next exchange of shares."""

    dimension: Dimension
    limit: int
    remaining: int
    amount: int
    retry_after_s: float | None
    may_fit: bool = False
    applied: Applied | None = None
    """All limits of the request."""
    meter: str = ""
    """The key of its meter."""

    @property
    def is_tokens(self) -> bool:
        return self.dimension in (Dimension.PROMPT, Dimension.OUTPUT)


class Applied:
    """The meters of a tenant's requests to one model."""

    def __init__(self, quotas: Sequence[Quota], meters: Sequence[Meter]) -> None:
        self.quotas = quotas
        by_dimension = {one: tuple(each for each in meters if each.dimension is one) for one in Dimension}
        self.requests, self.concurrent = by_dimension[Dimension.REQUESTS], by_dimension[Dimension.CONCURRENT]
        self.prompt, self.output = by_dimension[Dimension.PROMPT], by_dimension[Dimension.OUTPUT]
        self.money = by_dimension[Dimension.MONEY]
        self.counted, self.tokens = self.requests + self.concurrent, self.prompt + self.output
        self.is_short = False
        """Whether the last request did not fit into a limit of tokens: while one is reached, the next requests are
        refused before their prompts are read."""
        self.header_lines: dict[object, Any] = {}
        """Kept by `request/quota_charges.py`."""


class Hold(msgspec.Struct, eq=False):
    """What one request has been counted with, from its begin to its end."""

    applied: Applied
    second: int
    """In which it began."""
    tokens_second: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_ended: bool = False


class Quotas:
    """The meters of all tenants. `sharing`: with the other processes that enforce the same limits; None if this one is
    alone. `now_s`: of a clock that never goes back."""

    def __init__(self, sharing: MeterSharing | None = None) -> None:
        self.sharing = sharing
        self._meters: dict[str, Meter] = {}
        self._applied: dict[tuple[str, ...], Applied] = {}

    def begin(
        self, tenant: str, quotas: Sequence[Quota], model: str, adapter: str, now_s: float, name: str = ""
    ) -> Hold | Short:
        """Count a request of a tenant with these quotas, to this base model and adapter, unless a limit is reached.
        `name`: what it was asked by, if that is another name."""
        applied, second = self._applied_to(tenant, quotas, model, adapter, name), int(now_s)
        for meter in applied.counted + applied.tokens if applied.is_short else applied.counted:
            if not self._admits(meter, second, 1):
                return self._short(applied, meter, now_s, 1)
        self._add(applied.counted, second, 1)
        return Hold(applied, second)

    def withdraw(self, hold: Hold, now_s: float) -> None:
        """Count a request no longer, because it begins again with another model."""
        self.end(hold, 0, 0, now_s)
        for meter in hold.applied.requests:
            meter.own.take_back(hold.second, 1)

    def receive(self, tenant: str, quotas: Sequence[Quota], now_s: float) -> Hold | Short:
        """Count a request as concurrent until `end`. Or, if none of the tenant's requests needs to be read, because no
        process has something left of a limit of all of them, that limit, a minute or at once."""
        applied, second = self._applied_to(tenant, quotas), int(now_s)
        for meter in applied.counted:
            if not (self._admits(meter, second, 1) or self._may_fit(meter, second, 1)):
                return self._short(applied, meter, now_s, 1)
        self._add(applied.concurrent, second, 1)
        return Hold(applied, second)

    def count(self, tenant: str, quotas: Sequence[Quota], now_s: float) -> None:
        """Count a request whose model is not known, also beyond the limit."""
        self._add(self._applied_to(tenant, quotas).requests, int(now_s), 1)

    def charge(self, hold: Hold, prompt_tokens: int, output_tokens: int, now_s: float) -> Short | None:
        """Count the tokens that a decided request is expected to cost, if they fit. If they do
        not, the caller ends the hold. The output is a guess: it never exceeds a whole limit, which would refuse the
        tenant for ever."""
        applied, second = hold.applied, int(now_s)
        output_tokens = min([output_tokens, *(meter.limit for meter in applied.output)])
        for meters, amount in ((applied.prompt, prompt_tokens), (applied.output, output_tokens)):
            for meter in meters:
                if not self._admits(meter, second, amount):
                    applied.is_short = True
                    return self._short(applied, meter, now_s, amount)
        applied.is_short = False
        hold.tokens_second, hold.prompt_tokens, hold.output_tokens = second, prompt_tokens, output_tokens
        self._add(applied.prompt, second, prompt_tokens)
        self._add(applied.output, second, output_tokens)
        return None

    def end(self, hold: Hold, prompt_tokens: int | None, output_tokens: int | None, now_s: float) -> None:
        """Replace the expected by the real cost; None: unknown. Idempotent."""
        if hold.has_ended:
            return
        hold.has_ended = True
        applied, second = hold.applied, int(now_s)
        for meter in applied.concurrent:
            meter.own.take_back(second, 1)
        if prompt_tokens is not None and prompt_tokens != hold.prompt_tokens:
            _correct(applied.prompt, hold.tokens_second, second, prompt_tokens - hold.prompt_tokens)
        if output_tokens is not None and output_tokens != hold.output_tokens:
            _correct(applied.output, hold.tokens_second, second, output_tokens - hold.output_tokens)
        if self.sharing is not None:
            self.sharing.mark_changed(applied.concurrent + applied.tokens)

    def money_of(self, owner: str, quotas: Sequence[Quota], model: str, name: str = "") -> Sequence[Meter]:
        """The meters of the money that an owner, a tenant or a provider, may spend on a hosted model."""
        return self._applied_to(owner, quotas, model, "", name).money

    def spend(self, meters: Sequence[Meter], amount: int, now_s: float) -> Short | None:
        """Count this money in all meters, if it fits."""
        second = int(now_s)
        for meter in meters:
            if not self._admits(meter, second, amount):
                return self._short(None, meter, now_s, amount)
        self._add(meters, second, amount)
        return None

    def spent(self, meters: Sequence[Meter], second: int, more: int, now_s: float) -> None:
        """Count what a request of that second has cost more than expected; less: negative."""
        _correct(meters, second, int(now_s), more)
        if self.sharing is not None:
            self.sharing.mark_changed(meters)

    def _add(self, meters: Sequence[Meter], second: int, amount: int) -> None:
        for meter in meters:
            meter.own.add(second, amount)
        if self.sharing is not None:
            self.sharing.mark_used(meters, second, amount)

    def _applied_to(self, tenant: str, quotas: Sequence[Quota], *models: str) -> Applied:
        applied = self._applied.get((tenant, *models))
        if applied is None or applied.quotas is not quotas:
            applied = self._apply(tenant, quotas, models)
        return applied

    # --- slow paths ---

    def _apply(self, tenant: str, quotas: Sequence[Quota], models: tuple[str, ...]) -> Applied:
        """The meters of these quotas that are for one of these names: known ones keep what they have counted."""
        limits: dict[tuple[str, Dimension], int] = {}
        for quota in quotas:
            if not quota.model or quota.model in models:
                for dimension, limit in quota.limits().items():
                    key = quota.model, dimension
                    limits[key] = min(limit, limits.get(key, limit))
        meters = [self._meter(tenant, name, dimension, limit) for (name, dimension), limit in limits.items()]
        applied = self._applied[(tenant, *models)] = Applied(quotas, meters)
        return applied

    def _meter(self, tenant: str, model: str, dimension: Dimension, limit: int) -> Meter:
        key = "\0".join((tenant, model, dimension.name))
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = Meter(key, dimension, limit, is_shared=self.sharing is not None)
        elif meter.limit != limit:
            meter.limit = limit
            meter.ceiling = limit if self.sharing is None else min(meter.ceiling, limit)
        return meter

    def _admits(self, meter: Meter, second: int, amount: int) -> bool:
        """Whether the amount fits: into the local share while other processes cannot be reached."""
        return meter.admits(second, amount) or (
            self.sharing is not None and self.sharing.admits_away(meter, second, amount)
        )

    def _may_fit(self, meter: Meter, second: int, amount: int) -> bool:
        """Whether another process may have this amount left."""
        return self.sharing is not None and not self.sharing.is_away and amount <= meter.remaining(second)

    def _short(self, applied: Applied | None, meter: Meter, now_s: float, amount: int) -> Short:
        remaining, may_fit = meter.remaining(int(now_s)), self._may_fit(meter, int(now_s), amount)
        if self.sharing is not None and may_fit:
            meter.waiting += amount
            self.sharing.mark_changed((meter,))
        retry_after_s = meter.retry_after_s(now_s, amount)
        return Short(meter.dimension, meter.limit, remaining, amount, retry_after_s, may_fit, applied, meter.key)


def _correct(meters: Sequence[Meter], counted_second: int, second: int, more: int) -> None:
    for meter in meters:
        if more > 0:
            meter.own.add(second, more)
        else:
            meter.own.take_back(counted_second, -more)
