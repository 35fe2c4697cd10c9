"""One system prompt for everybody: the traffic that breaks affinity routers, in virtual time."""

from __future__ import annotations

import heapq
from collections import defaultdict

import pytest

from router.decision import Candidate, Lease
from router.fleet.ledger import Ledger
from router.index.predicted import PredictedIndex
from router.index.shared import HEAVY_SHARE, SharedPrefixes
from router.policy.decide import decide
from router.types import PrefixMatch, PromptPrefix
from tests.index.dispatches import record
from tests.kit.scenes import BLOCK, POLICIES, SPEED, pod, prompt_of, ready, request, scene

PODS = 4
REQUESTS = 400
SHARED_BLOCKS = 125
TAIL_TOKENS = 300


class City:
    """Pods that prefill one prompt at a time, and a router that knows what it has sent them."""

    def __init__(self, policy: str) -> None:
        self.policy = POLICIES[policy]
        self.statuses = ready(*(pod(f"pod-{number}") for number in range(PODS)))
        self.shared, self.index, self.ledger = SharedPrefixes(), PredictedIndex(), Ledger()
        self.free_at_s = {status.pod.id: 0.0 for status in self.statuses}
        self.prefilling: list[tuple[float, int, Lease]] = []
        self.work_ms: defaultdict[str, float] = defaultdict(float)
        self.cached_tokens = 0

    def serve(self, number: int, asked: PromptPrefix, now_s: float) -> None:
        while self.prefilling and self.prefilling[0][0] <= now_s:
            ended_s, _, lease = heapq.heappop(self.prefilling)
            self.ledger.release(lease, ended_s)
        seen = scene(
            *self.statuses,
            request=request(f"r{number}"),
            prompt=asked,
            match=PrefixMatch(self.index.match(asked.hashes, now_s)),
            inflight=self.ledger.inflight(),
            now_s=now_s,
            turn=number,
            shared_blocks=self.shared.observe(asked.hashes, threshold=HEAVY_SHARE / PODS),
        )
        self.dispatch(decide(seen, self.policy).candidates[0], asked, now_s)

    def dispatch(self, chosen: Candidate, asked: PromptPrefix, now_s: float) -> None:
        lease = self.ledger.book(chosen.pod, asked.token_count, chosen.cached_tokens, now_s)
        record(self.index, chosen.pod.id, asked.hashes, now_s, ttl_s=3600)
        self.free_at_s[chosen.pod.id] = max(self.free_at_s[chosen.pod.id], now_s) + lease.prefill_ms / 1000
        heapq.heappush(self.prefilling, (self.free_at_s[chosen.pod.id], lease.id, lease))
        self.work_ms[chosen.pod.id] += lease.prefill_ms
        self.cached_tokens += chosen.cached_tokens


@pytest.mark.parametrize("utilisation", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("policy", ["cost_aware", "ring_bounded_load"])
def test_a_prefix_that_all_share_is_everywhere_and_hit_everywhere(policy: str, utilisation: float) -> None:
    """No pod does more than 1.5x the mean work, and at least 90 % of the ideal hits are had."""
    city = City(policy)
    system = list(range(SHARED_BLOCKS * BLOCK))
    tokens = len(system) + TAIL_TOKENS
    interval_s = SPEED.prefill_ms(tokens, len(system)) / 1000 / PODS / utilisation
    for number in range(REQUESTS):
        tail = [1_000_000 + number * TAIL_TOKENS + place for place in range(TAIL_TOKENS)]
        city.serve(number, prompt_of(system + tail), number * interval_s)
    assert max(city.work_ms.values()) <= 1.5 * sum(city.work_ms.values()) / PODS, city.work_ms
    assert city.cached_tokens >= 0.9 * len(system) * (REQUESTS - 1)
