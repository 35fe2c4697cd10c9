"""Request metrics by workload class, policy and tenant.

Few labels: classes and policies are configured, and only the busiest tenants have a label; all others are `other`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from operator import itemgetter

from router.observe.declared import of_requests
from router.observe.ended import Ended, UsedTokens
from router.observe.exposition import Registry
from router.observe.fast_metrics import OTHER, CountsByLast, Labels
from router.observe.token_metrics import TokenMetrics
from router.policy.recording import RecordedScene
from router.types import BlockHash

_KINDS = ("prompt", "cached", "computed", "output")
NAMED_TENANTS = 20
COUNTED_TENANTS = 1000
"""Maximum number of tenants that are counted; those with the fewest requests are dropped."""
RENEW_EVERY_REQUESTS = 1024
MAX_TENANT_CHARACTERS = 64
"""Longer names, which clients choose, are cut."""


class ClassMetrics:
    def __init__(self, r: Registry) -> None:
        self._requests = r[of_requests.CLASS_REQUESTS]
        self._refusals = r[of_requests.QUOTA_REFUSALS]
        self._usage = CountsByLast(r[of_requests.USAGE_TOKENS], _KINDS)
        self._slo = r[of_requests.SLO_REQUESTS]
        self._in_flight_tokens = r[of_requests.TENANT_IN_FLIGHT_TOKENS]
        self.tokens = TokenMetrics(r)
        self.reuse = ReuseMetrics(r)
        self.tenants = BusiestTenants()

    def observe_quota_refusal(self, tenant: str, limit: str) -> None:
        self._refusals.labels(self._label(tenant), limit).inc()

    def observe_usage(self, tenant: str, model: str, used: UsedTokens) -> None:
        tenant = tenant[:MAX_TENANT_CHARACTERS]
        label = tenant if self.tenants.is_named(tenant) else OTHER
        tokens = used.prompt_tokens, used.cached_tokens, used.computed_tokens, used.output_tokens
        for count, more in zip(self._usage[label, model], tokens, strict=True):
            count.value += more

    def _label(self, tenant: str) -> str:
        """Count one request of a tenant; returns the tenant's label."""
        label = self.tenants.label(tenant[:MAX_TENANT_CHARACTERS])
        if unnamed := self.tenants.unnamed:
            self._requests.remove_where(lambda labels: labels[1] in unnamed)
            self._refusals.remove_where(lambda labels: labels[0] in unnamed)
            self.tokens.remove_tenants(unnamed)
            self._usage.remove_where(lambda labels: labels[0] in unnamed)
            self.tenants.unnamed = []
        return label

    def observe_in_flight(self, tokens: Mapping[str, int]) -> None:
        """Update the gauge of prompt tokens being served, by tenant: the busiest, and those with the most tokens while
        there are fewer than `NAMED_TENANTS`."""
        found: dict[Labels, float] = {}
        for tenant, count in sorted(tokens.items(), key=itemgetter(1), reverse=True):
            name = tenant[:MAX_TENANT_CHARACTERS]
            if not self.tenants.is_named(name) and len(found) >= NAMED_TENANTS:
                name = OTHER
            found[name,] = found.get((name,), 0.0) + count
        self._in_flight_tokens.replace(found)

    def settle(self, ended: Ended, scene: RecordedScene) -> None:
        """Count one decided request that ended. `scene` has its holders."""
        ttft_ms, tenant = ended.ttft_ms, self._label(ended.tenant)
        self._requests.labels(ended.workload, tenant, ended.result).value += 1
        if ttft_ms is not None and ended.ttft_limit_ms is not None:
            self._slo.labels(ended.model, ended.policy, "true" if ttft_ms <= ended.ttft_limit_ms else "false").inc()
        if scene.prompt_tokens is not None and ended.result == "ok" and ended.served is not None:
            self.tokens.add(ended, tenant, scene)
            self.reuse.add(ended.model, scene.key, scene.now_s)


class BusiestTenants:
    """The tenants with the most requests. The caller removes the series of the tenants in `unnamed` and empties it."""

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

    def is_named(self, tenant: str) -> bool:
        return tenant in self._named

    def _renew(self) -> None:
        """Name the busiest, and halve the counts, so that recent requests weigh more."""
        most = sorted(self._requests.items(), key=itemgetter(1), reverse=True)[:COUNTED_TENANTS]
        busiest = {tenant for tenant, _ in most[:NAMED_TENANTS]}
        self.unnamed += self._named - busiest
        self._named = busiest
        self._requests = {tenant: count / 2 for tenant, count in most if count > 1}


MAX_PREFIXES = 32_768
"""The latest prefixes, whose next use is recognised: about 5 MB."""


class ReuseMetrics:
    """Intervals between two uses of a prefix."""

    def __init__(self, r: Registry) -> None:
        self._interval_s = r[of_requests.REUSE_INTERVAL_S]
        self._used_s: OrderedDict[BlockHash, float] = OrderedDict()
        """Oldest use first. Finding the first key of a `dict` takes 6 us after many removals."""

    def add(self, model: str, key: BlockHash, now_s: float) -> None:
        """Add a use of the prefix whose last block is `key`; 0 for a prompt without blocks."""
        if not key:
            return
        used_s = self._used_s.pop(key, None)
        self._used_s[key] = now_s
        if used_s is not None:
            self._interval_s.labels(model).observe(now_s - used_s)
        elif len(self._used_s) > MAX_PREFIXES:
            self._used_s.popitem(last=False)
