"""How are requests served, by the kind of work they are, by policy and by tenant?

Few labels on purpose: classes and policies are configured, and only the tenants that ask most have a label of their
own; all others are `other`. This file never sees a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import msgspec
from prometheus_client import CollectorRegistry

from router.observe.tally import Count, Counter, Histogram, Spread

NAMED_TENANTS = 20
COUNTED_TENANTS = 1000
"""Of so many at most it is known how much they ask; what is rarer is forgotten first."""
RENEWED_EVERY = 1024
"""Requests after which it is looked anew who asks most."""
OTHER = "other"
LONGEST_NAME = 64
"""Of a tenant, in characters: clients choose it."""


class Slice(msgspec.Struct, frozen=True, gc=False):
    """One request that has ended. `cached_tokens` as the engine reported them, None where it did not; `ttft_s` of
    streamed answers; `slo_ttft_ms` is what its policy promises."""

    workload: str
    policy: str
    tenant: str
    result: str
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float | None = None
    slo_ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class _Bound:
    """Members with their labels."""

    ttft_s: Spread
    prompt_tokens: Count
    cached_tokens: Count


class Slices:
    """The sliced metrics."""

    def __init__(self, r: CollectorRegistry, buckets: tuple[float, ...]) -> None:
        by = ["class", "policy"]
        self._requests = Counter(
            "warmroute_class_requests",
            "Requests by workload class, tenant (the busiest; others together) and how they ended.",
            ["class", "tenant", "result"],
            registry=r,
        )
        self._ttft_s = Histogram(
            "warmroute_class_time_to_first_token_seconds",
            "Arrival to first token, streamed requests, by workload class and policy.",
            by,
            buckets=buckets,
            registry=r,
        )
        self._prompt_tokens = Counter(
            "warmroute_class_prompt_tokens", "Prompt tokens of requests whose engine reported its hits.", by, registry=r
        )
        self._cached_tokens = Counter(
            "warmroute_class_cached_tokens", "Of these, found in a cache by the engine's account.", by, registry=r
        )
        self._slo = Counter(
            "warmroute_policy_slo_requests",
            "Streamed requests of policies with slo.ttft_ms, by whether the first token came in time.",
            ["policy", "met"],
            registry=r,
        )
        self._bound: dict[tuple[str, str], _Bound] = {}
        self.tenants = Tenants()

    def settle(self, one: Slice) -> None:
        """Add one request."""
        tenants = self.tenants
        tenant = tenants.label(one.tenant[:LONGEST_NAME])
        while tenants.fallen:
            self._drop(tenants.fallen.pop())
        self._requests.of[one.workload, tenant, one.result].value += 1
        bound = self._bound.get((one.workload, one.policy)) or self._bind(one.workload, one.policy)
        if one.ttft_s is not None:
            bound.ttft_s.observe(one.ttft_s)
            if one.slo_ttft_ms is not None:
                self._slo.labels(one.policy, "true" if one.ttft_s * 1000 <= one.slo_ttft_ms else "false").inc()
        if one.cached_tokens is not None:
            bound.prompt_tokens.value += one.prompt_tokens
            bound.cached_tokens.value += one.cached_tokens

    def _bind(self, workload: str, policy: str) -> _Bound:
        by = workload, policy
        bound = _Bound(self._ttft_s.labels(*by), self._prompt_tokens.labels(*by), self._cached_tokens.labels(*by))
        self._bound[by] = bound
        return bound

    def _drop(self, tenant: str) -> None:
        """It counts among the others from now on: its own series end."""
        for key in [key for key in self._requests.of if key[1] == tenant]:
            self._requests.remove(*key)


class Tenants:
    """Which tenants ask most. `fallen` are those that lost their names; whoever drops their series empties it."""

    def __init__(self) -> None:
        self.fallen: list[str] = []
        self._asked: dict[str, float] = {}
        self._named: set[str] = set()
        self._seen = 0

    def label(self, tenant: str) -> str:
        """Count one request; its tenant's name, or `other`."""
        self._asked[tenant] = self._asked.get(tenant, 0.0) + 1
        self._seen += 1
        if self._seen % RENEWED_EVERY == 0:
            self._renew()
        if tenant in self._named:
            return tenant
        if len(self._named) < NAMED_TENANTS:
            self._named.add(tenant)
            return tenant
        return OTHER

    def _renew(self) -> None:
        """The busiest have names; older requests count half."""
        most = sorted(self._asked.items(), key=itemgetter(1), reverse=True)[:COUNTED_TENANTS]
        busiest = {tenant for tenant, _ in most[:NAMED_TENANTS]}
        self.fallen += self._named - busiest
        self._named = busiest
        self._asked = {tenant: count / 2 for tenant, count in most if count > 1}
