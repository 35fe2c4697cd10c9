"""In which order are waiting requests sent?

Higher bands first; in a band, tenants by weighted fair queueing in prefill milliseconds; of one tenant, the request
that has to start first. What counts is the prefill that a request really needs, so a tenant whose prefixes are cached
is served more often.
Sources: VTC (2401.00588) and DLPM (2501.14312), with start-time fair queueing (Goyal et al. 1996).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from router.admission.tenant import OPEN_TENANT, Tenant


class Waiting(msgspec.Struct, eq=False):
    """A request that may have to wait. It has to get its first token in `ttft_limit_ms`.

    In the queue, it has to be sent by `start_by_s` for that, and is refused then. `prefill_ms` is the latest estimate
    of the prefill that it needs. `context` belongs to the caller."""

    tenant: Tenant
    ttft_limit_ms: float = math.inf
    body_bytes: int = 0
    context: Any = None
    number: int = -1
    start_by_s: float = 0.0
    prefill_ms: float = 0.0
    is_queued: bool = False

    @property
    def order(self) -> tuple[float, int]:
        return self.start_by_s, self.number


_order = attrgetter("order")


@dataclass(slots=True, eq=False)
class _Backlog:
    """The waiting requests of one tenant, in order. `virtual_ms`: the prefill that it got, divided by its weight."""

    virtual_ms: float
    tenant: Tenant = OPEN_TENANT
    waiting: list[Waiting] = field(default_factory=list)
    prefill_ms: float = 0.0


class _Band:
    """The tenants of one priority band. `virtual_ms` is that of the tenant served last, when it was served: a tenant
    that comes back starts there, and gets nothing for the time without requests."""

    def __init__(self) -> None:
        self.virtual_ms = 0.0
        self.tenants: dict[str, _Backlog] = {}

    def virtual_of(self, name: str) -> float:
        known = self.tenants.get(name)
        return max(known.virtual_ms, self.virtual_ms) if known else self.virtual_ms

    def in_order(self) -> Iterator[Waiting]:
        """The order in which they would be sent if all took the prefill that is expected. Of tenants that got the same,
        the request that arrived first."""
        heads = [(one.virtual_ms, one.waiting[0].number, one, 0) for one in self.tenants.values() if one.waiting]
        heapq.heapify(heads)
        while heads:
            virtual_ms, _, backlog, at = heads[0]
            one = backlog.waiting[at]
            yield one
            if at + 1 < len(backlog.waiting):
                virtual_ms += one.prefill_ms / backlog.tenant.weight
                heapq.heapreplace(heads, (virtual_ms, backlog.waiting[at + 1].number, backlog, at + 1))
            else:
                heapq.heappop(heads)


class FairOrder:
    """Waiting requests in the order in which they are sent. All operations are O(tenants + log requests)."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, one: Waiting) -> None:
        band, name = self._bands.setdefault(one.tenant.band, _Band()), one.tenant.name
        backlog = band.tenants.get(name)
        if backlog is None or not backlog.waiting:
            backlog = band.tenants[name] = _Backlog(band.virtual_of(name))
        backlog.tenant = one.tenant
        insort(backlog.waiting, one, key=_order)
        one.is_queued = True
        backlog.prefill_ms += one.prefill_ms
        self._count += 1

    def remove(self, one: Waiting) -> None:
        """Take a request out, without service. Raises `KeyError` if it does not wait."""
        band = self._bands[one.tenant.band]
        backlog = band.tenants[one.tenant.name]
        at = bisect_left(backlog.waiting, one.order, key=_order)
        if at == len(backlog.waiting) or backlog.waiting[at] is not one:
            raise KeyError(one.number)
        del backlog.waiting[at]
        one.is_queued = False
        # sums of floats drift; an empty backlog is exactly empty
        backlog.prefill_ms = backlog.prefill_ms - one.prefill_ms if backlog.waiting else 0.0
        self._count -= 1
        self._drop_idle(one.tenant.band)

    def serve(self, one: Waiting, prefill_ms: float) -> None:
        """Take a request out that is sent and needs `prefill_ms`. Raises `KeyError` if it does not wait."""
        band = self._bands[one.tenant.band]
        backlog = band.tenants[one.tenant.name]
        band.virtual_ms = max(band.virtual_ms, backlog.virtual_ms)
        backlog.virtual_ms += prefill_ms / one.tenant.weight
        self.remove(one)

    def estimate(self, one: Waiting, prefill_ms: float) -> None:
        """Update the prefill that a waiting request is expected to need."""
        self._bands[one.tenant.band].tenants[one.tenant.name].prefill_ms += prefill_ms - one.prefill_ms
        one.prefill_ms = prefill_ms

    def in_order(self) -> Iterator[Waiting]:
        """All waiting requests, first to be sent first. Do not change the order while iterating."""
        for number in sorted(self._bands, reverse=True):
            yield from self._bands[number].in_order()

    def most_urgent(self) -> Waiting | None:
        """The request that has to start first; None if nobody waits."""
        heads = (one.waiting[0] for band in self._bands.values() for one in band.tenants.values() if one.waiting)
        return min(heads, key=_order, default=None)

    def ahead_ms(self, tenant: Tenant, start_by_s: float, *, own: bool = True) -> float:
        """The prefill of all requests that would be sent before a new one. `own`: count the tenant's own requests."""
        ahead_ms = sum(
            backlog.prefill_ms
            for number, band in self._bands.items()
            if number > tenant.band
            for backlog in band.tenants.values()
        )
        if (band := self._bands.get(tenant.band)) is None:
            return ahead_ms
        own_ms = band_own_ms(band.tenants.get(tenant.name), start_by_s) if own else 0.0
        start_ms = band.virtual_of(tenant.name) + own_ms / tenant.weight
        others = (backlog for name, backlog in band.tenants.items() if name != tenant.name)
        return ahead_ms + own_ms + sum(_until(backlog, start_ms) for backlog in others)

    def may_overtake(self, tenant: Tenant) -> bool:
        """Whether no request of this tenant waits, and none of a higher band."""
        return not any(number > tenant.band for number in self._bands) and not (
            (band := self._bands.get(tenant.band)) and (own := band.tenants.get(tenant.name)) and own.waiting
        )

    def others_wait(self, tenant: Tenant) -> bool:
        """Whether requests of other tenants wait, too."""
        names = (name for band in self._bands.values() for name, one in band.tenants.items() if one.waiting)
        return any(name != tenant.name for name in names)

    def last_of_largest(self) -> Waiting | None:
        """In the lowest band, the last request of the tenant with the most prefill for its weight; None if empty."""
        if not self._count:
            return None
        band = min(number for number, one in self._bands.items() if any(b.waiting for b in one.tenants.values()))
        backlogs = (one for one in self._bands[band].tenants.values() if one.waiting)
        return max(backlogs, key=lambda one: one.prefill_ms / one.tenant.weight).waiting[-1]

    def _drop_idle(self, number: int) -> None:
        """Drop tenants without requests that are owed nothing and owe nothing; the band if nobody waits in it."""
        band = self._bands[number]
        if not any(one.waiting for one in band.tenants.values()):
            del self._bands[number]
            return
        for name in [n for n, b in band.tenants.items() if not b.waiting and b.virtual_ms <= band.virtual_ms]:
            del band.tenants[name]


def band_own_ms(backlog: _Backlog | None, start_by_s: float) -> float:
    """The prefill of the requests of one tenant that have to start earlier, or at the same time."""
    if backlog is None or not backlog.waiting:
        return 0.0
    if backlog.waiting[-1].start_by_s <= start_by_s:
        return backlog.prefill_ms
    return sum(one.prefill_ms for one in backlog.waiting if one.start_by_s <= start_by_s)


def _until(backlog: _Backlog, virtual_ms: float) -> float:
    """The prefill of the requests of this tenant that start until it has been served to `virtual_ms`. The last of them
    counts as a mean one."""
    due_ms = (virtual_ms - backlog.virtual_ms) * backlog.tenant.weight
    if not backlog.waiting or due_ms < 0:
        return 0.0
    return min(backlog.prefill_ms, due_ms + backlog.prefill_ms / len(backlog.waiting))


MAX_AHEAD_S = 600.0
"""A tenant that used much more than its share while others sent little is active for no longer than this."""

_Key: TypeAlias = tuple[int, str]


class _Use(msgspec.Struct, gc=False):
    """An active tenant. At `even_s`, its prompts would be computed at its share."""

    even_s: float
    weight: float


class FairShares:
    """Whether tenants of one model have used their shares of the fleet's prefill. All operations are O(log tenants) on
    average.

    A tenant is active until all prompts sent for it would be computed at its share: its weight in those of all active
    tenants of its priority band. If all together send more than the fleet computes, active tenants become more until
    their shares are what the fleet computes. Sources: generalized processor sharing (Parekh and Gallager 1993), virtual
    clock (Zhang 1990)."""

    def __init__(self) -> None:
        self._active: dict[_Key, _Use] = {}
        self._ends: list[tuple[float, _Key]] = []
        """One entry for each active tenant, at a time that it is active at least until."""
        self._weights: dict[int, float] = {}
        """Sum of the weights of the active tenants, by band."""

    def is_within(self, tenant: Tenant, now_s: float, early_ms: float) -> bool:
        """Whether it has not used its share. While others are active, it may use it `early_ms` early: its requests come
        unevenly, and would wait for each other otherwise."""
        self._drop_idle(now_s)
        use = self._active.get((tenant.band, tenant.name))
        return use is None or (len(self._active) > 1 and use.even_s - now_s <= early_ms / 1000)

    def sent(self, tenant: Tenant, fleet_ms: float, now_s: float) -> None:
        """Count a prompt. `fleet_ms`: the time that it takes of all pods together."""
        self._drop_idle(now_s)
        key = tenant.band, tenant.name
        use = self._active.get(key)
        if use is None:
            use = self._active[key] = _Use(now_s, 0.0)
            heapq.heappush(self._ends, (now_s, key))
        weights = self._weights.get(tenant.band, 0.0) + tenant.weight - use.weight
        self._weights[tenant.band], use.weight = weights, tenant.weight
        share = tenant.weight / max(weights, tenant.weight)  # sums of floats drift
        use.even_s = min(use.even_s + fleet_ms / share / 1000, now_s + MAX_AHEAD_S)

    def _drop_idle(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            key = self._ends[0][1]
            use = self._active[key]
            if use.even_s > now_s:
                heapq.heapreplace(self._ends, (use.even_s, key))
                continue
            heapq.heappop(self._ends)
            del self._active[key]
            self._weights[key[0]] -= use.weight
        if not self._active:
            self._weights.clear()
