"""Request metrics by workload class, policy and tenant.

Few labels: classes and policies are configured, and only the busiest tenants have a label; all others are `other`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import itemgetter

from router.decision import Split
from router.observe.declared import of_decisions, of_requests
from router.observe.ended import Ended, UsedTokens
from router.observe.fast_metrics import MAX_SERIES, OTHER, Count, CountsByLast, Labels, Registry
from router.policy.recording import RecordedScene
from router.types import BlockHash, BlocksByTier, Role, Tier

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
        self._requests.children[ended.workload, tenant, ended.result].value += 1
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
            self._interval_s.children[model,].observe(now_s - used_s)
        elif len(self._used_s) > MAX_PREFIXES:
            self._used_s.popitem(last=False)


_TIERS = (*(tier.name.lower() for tier in Tier), "peer")
"""The last is for tokens that are pulled from another pod."""
_STAGES = ("all", "available", "captured", "delivered")
_NOTHING: BlocksByTier = (0, 0, 0, 0)


class TokenMetrics:
    """Prompt tokens of served requests, by model, class and policy, and by tenant. Which cached ones could have served
    the prompts, and which did?

        available   held by the pod with the longest prefix when the request was decided
        captured    held by the pod that was sent the request, as predicted
        delivered   taken from its cache, as reported by the engine

    The gaps explain a low hit rate. Available over captured: other costs, such as queues, outweighed the prefix.
    Captured over delivered: evicted meanwhile. Delivered over captured: the index is late."""

    def __init__(self, r: Registry) -> None:
        self.prompt = r[of_requests.PROMPT_TOKENS]
        self._reported = r[of_requests.REPORTED_PROMPT_TOKENS]
        self._available = r[of_requests.AVAILABLE_TOKENS]
        self._captured = r[of_requests.CAPTURED_TOKENS]
        self._delivered = r[of_requests.DELIVERED_TOKENS]
        self._splits = CountsByLast(r[of_requests.SPLIT_TOKENS], ("computed", "again"))
        self._tenants = CountsByLast(r[of_requests.TENANT_TOKENS], _STAGES)
        self._error = r[of_requests.CACHED_ERROR]
        self._depth = r[of_requests.PREFIX_DEPTH]
        self._decisions = r[of_decisions.DECISIONS]
        self._series: dict[Labels, _Series] = {}

    def remove_tenants(self, tenants: Sequence[str]) -> None:
        self._tenants.remove_where(lambda labels: labels[0] in tenants)

    def add(self, ended: Ended, tenant: str, scene: RecordedScene) -> None:
        """Add one served prompt; `scene` has its holders, `tenant` is a label. O(holders)."""
        labels = (ended.model, ended.workload, ended.policy)
        served, delivered, match, block = ended.served, ended.cached_tokens, scene.match, scene.block_size_tokens
        assert served is not None
        plan, longest = served.plan, max(match.values(), key=sum) if match else _NOTHING
        if isinstance(plan, Split):
            kind, own = "split", match.get(plan.prefill.id, _NOTHING)
            self._add_split(ended, plan, scene)
        else:
            kind, own = "pull" if plan.pull else "direct", match.get(plan.pod.id, _NOTHING)
        blocks, series = sum(longest), self._series.get(labels) or self._new_series(labels)
        reason = "cold" if not blocks else "prefix" if sum(own) == blocks else "price"
        prompt, available, captured = ended.prompt_tokens, blocks * block, served.cached_tokens
        of_tenant = self._tenants[(tenant,)]  # in the order of `_STAGES`
        of_tenant[0].value += prompt
        of_tenant[1].value += available
        of_tenant[2].value += captured
        series.prompt.value += prompt
        _add(series.available, longest, available, block)
        _add(series.captured, own, captured, block)
        if delivered is not None:
            of_tenant[3].value += delivered
            series.reported.value += prompt
            series.delivered.value += delivered
            series.error.observe(abs(delivered - captured))
        series.depth.observe(available)
        self._decisions.children[labels[2], kind, reason].value += 1

    def _add_split(self, ended: Ended, plan: Split, scene: RecordedScene) -> None:
        """Add what the prefill pod computed, and what of it a decode pod held. A last block may be incomplete."""
        assert ended.served is not None
        cached = ended.served.cached_tokens if ended.cached_tokens is None else ended.cached_tokens
        known = ((scene.fleet.find(pod_id), blocks) for pod_id, blocks in scene.match.items())
        held = max((sum(blocks) for status, blocks in known if status and status.pod.role is Role.DECODE), default=0)
        computed, again = self._splits[ended.model, plan.decode.handoff]
        computed.value += max(ended.prompt_tokens - cached, 0)
        more_tokens = min(held * scene.block_size_tokens, ended.prompt_tokens) - cached
        again.value += more_tokens if more_tokens > scene.block_size_tokens else 0

    def _new_series(self, labels: Labels) -> _Series:
        if len(self._series) >= MAX_SERIES:
            self._series.clear()
        found = self._series[labels] = _Series(self, labels)
        return found


class _Series:
    """The series of one model, class and policy: a lookup for all of them."""

    __slots__ = ("available", "captured", "delivered", "depth", "error", "prompt", "reported")

    def __init__(self, metrics: TokenMetrics, labels: Labels) -> None:
        self.prompt = metrics.prompt.labels(*labels)
        self.reported = metrics._reported.labels(*labels)
        self.delivered = metrics._delivered.labels(*labels)
        self.available = [metrics._available.labels(*labels, tier) for tier in _TIERS]
        self.captured = [metrics._captured.labels(*labels, tier) for tier in _TIERS]
        self.error = metrics._error.labels(labels[0])
        self.depth = metrics._depth.labels(labels[0])


def _add(series: Sequence[Count], blocks: BlocksByTier, tokens: int, block: int) -> None:
    """Add `tokens` by tier, of a pod that holds `blocks`; the last of `series` is for those that it does not hold."""
    if blocks[0] * block >= tokens:
        series[0].value += tokens
        return
    for tier, count in enumerate(blocks):
        here = min(count * block, tokens)
        series[tier].value += here
        tokens -= here
        if not tokens:
            return
    series[-1].value += tokens
