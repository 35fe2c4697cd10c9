"""Has a tenant used its share of the fleet's prefill?

A tenant is active until all prompts sent for it would be computed at its share: its weight in those of all active
tenants of its priority band. If all together send more than the fleet computes, active tenants become more until
their shares are what the fleet computes.
Sources: generalized processor sharing (Parekh and Gallager 1993), virtual clock (Zhang 1990).
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

import msgspec

from router.admission.tenant import Tenant

MAX_AHEAD_S = 600.0
"""A tenant that used much more than its share while others sent little is active for no longer than this."""

_Key: TypeAlias = tuple[int, str]


class _Use(msgspec.Struct, gc=False):
    """An active tenant. At `even_s`, its prompts would be computed at its share."""

    even_s: float
    weight: float


class FairShares:
    """The active tenants of one model. All operations are O(log tenants) on average."""

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
