"""Which cached tokens could have served the prompts, and which did?

    available   held by the pod with the longest prefix when the request was decided
    captured    held by the pod that was sent the request, as predicted
    delivered   taken from its cache, as reported by the engine

The gaps explain a low hit rate. Available over captured: other costs, such as queues, outweighed the prefix. Captured
over delivered: evicted meanwhile. Delivered over captured: the index is late.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Split
from router.observe.declared import of_decisions, of_requests
from router.observe.ended import Ended
from router.observe.exposition import Registry
from router.observe.fast_metrics import MAX_SERIES, Count, CountsByLast, Labels
from router.policy.recording import RecordedScene
from router.types import BlocksByTier, Tier

_TIERS = (*(tier.name.lower() for tier in Tier), "peer")
"""The last is for tokens that are pulled from another pod."""
_STAGES = ("all", "available", "captured", "delivered")
_NOTHING: BlocksByTier = (0, 0, 0, 0)


class TokenMetrics:
    """Prompt tokens of served requests, by model, class and policy, and by tenant."""

    def __init__(self, r: Registry) -> None:
        self.prompt = r[of_requests.PROMPT_TOKENS]
        self._reported = r[of_requests.REPORTED_PROMPT_TOKENS]
        self._available = r[of_requests.AVAILABLE_TOKENS]
        self._captured = r[of_requests.CAPTURED_TOKENS]
        self._delivered = r[of_requests.DELIVERED_TOKENS]
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
        self._decisions.labels(labels[2], kind, reason).value += 1

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
