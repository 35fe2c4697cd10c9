"""Request metrics by workload class, policy and tenant.

Few labels: classes and policies are configured, and only the busiest tenants have a label; all others are `other`.
"""

from __future__ import annotations

from operator import itemgetter

import msgspec
from prometheus_client import CollectorRegistry

from router.observe.fast_metrics import Counter, Histogram

NAMED_TENANTS = 20
COUNTED_TENANTS = 1000
"""Maximum number of tenants that are counted; the rarest are dropped first."""
RENEW_EVERY_REQUESTS = 1024
OTHER = "other"
MAX_TENANT_CHARACTERS = 64
"""Clients choose the name."""


class ClassifiedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request that ended. `cached_tokens` as reported by the engine, else None; `ttft_s` of streamed responses;
    `slo_ttft_ms` of its policy."""

    workload: str
    policy: str
    tenant: str
    result: str
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float | None = None
    slo_ttft_ms: float | None = None


class ClassMetrics:
    """The metrics by class, policy and tenant."""

    def __init__(self, r: CollectorRegistry, buckets: tuple[float, ...]) -> None:
        by = ["class", "policy"]
        self._requests = Counter(
            "warmroute_class_requests",
            "Requests by workload class, tenant (the busiest, and `other`) and result.",
            ["class", "tenant", "result"],
            registry=r,
        )
        self._ttft_s = Histogram(
            "warmroute_class_time_to_first_token_seconds",
            "Seconds from arrival to first token of streamed requests, by workload class and policy.",
            by,
            buckets=buckets,
            registry=r,
        )
        self._prompt_tokens = Counter(
            "warmroute_class_prompt_tokens",
            "Prompt tokens of requests whose engine reported cached tokens.",
            by,
            registry=r,
        )
        self._cached_tokens = Counter(
            "warmroute_class_cached_tokens", "Cached prompt tokens as reported by engines.", by, registry=r
        )
        self._slo = Counter(
            "warmroute_policy_slo_requests",
            "Streamed requests of policies with slo.ttft_ms, by whether the first token met it.",
            ["policy", "met"],
            registry=r,
        )
        self.tenants = BusiestTenants()

    def settle(self, one: ClassifiedRequest) -> None:
        """Count one request."""
        tenants, by = self.tenants, (one.workload, one.policy)
        tenant = tenants.label(one.tenant[:MAX_TENANT_CHARACTERS])
        if tenants.unnamed:
            self._remove(tenants.unnamed)
            tenants.unnamed = []
        self._requests.labels(one.workload, tenant, one.result).inc()
        if one.ttft_s is not None:
            self._ttft_s.labels(*by).observe(one.ttft_s)
            if one.slo_ttft_ms is not None:
                self._slo.labels(one.policy, "true" if one.ttft_s * 1000 <= one.slo_ttft_ms else "false").inc()
        if one.cached_tokens is not None:
            self._prompt_tokens.labels(*by).inc(one.prompt_tokens)
            self._cached_tokens.labels(*by).inc(one.cached_tokens)

    def _remove(self, tenants: list[str]) -> None:
        """End the series of tenants that count as `other` from now on."""
        self._requests.remove_where(lambda labels: labels[1] in tenants)


class BusiestTenants:
    """Which tenants send most requests. The owner of their series removes those of `unnamed` and empties it."""

    def __init__(self) -> None:
        self.unnamed: list[str] = []
        self._requests: dict[str, float] = {}
        self._named: set[str] = set()
        self._seen = 0

    def label(self, tenant: str) -> str:
        """Count one request; returns the tenant's label, its name or `other`."""
        self._requests[tenant] = self._requests.get(tenant, 0.0) + 1
        self._seen += 1
        if self._seen % RENEW_EVERY_REQUESTS == 0:
            self._renew()
        if tenant in self._named:
            return tenant
        if len(self._named) < NAMED_TENANTS:
            self._named.add(tenant)
            return tenant
        return OTHER

    def _renew(self) -> None:
        """Name the busiest; halve the counts, so that recent requests weigh more."""
        most = sorted(self._requests.items(), key=itemgetter(1), reverse=True)[:COUNTED_TENANTS]
        busiest = {tenant for tenant, _ in most[:NAMED_TENANTS]}
        self.unnamed += self._named - busiest
        self._named = busiest
        self._requests = {tenant: count / 2 for tenant, count in most if count > 1}
