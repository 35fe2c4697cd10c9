"""What shadow caches say of a placement is what happens when the router really places so."""

from __future__ import annotations

from array import array
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

import pytest
import xxhash

from loadtest.simulator.generate import Kind, TrafficMix
from loadtest.simulator.outcome import cached_share
from loadtest.simulator.router_view import UNOBSERVED, RouterSettings
from loadtest.simulator.scenario import Conditions
from loadtest.simulator.traffic import Traffic
from loadtest.simulator.virtual_pod import VirtualPodConfig
from loadtest.simulator.world import World
from router.config.load import shipped
from router.config.policy_files import load_policies
from router.observe.counters import Counters
from router.observe.declared import of_decisions
from router.observe.ended import Ended
from router.observe.metrics import Metrics
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ALTERNATIVES, FOLLOW_S, MAX_ERROR, ShadowCaches
from router.policy.spec import Policy
from router.request.life import Observers
from tests.kit.worlds import equal_pods, speed_of

BLOCK, PODS = 16, 4
SHORT: dict[str, Any] = {"first_tokens": (20, 80), "output_tokens": (20, 60)}
CHAT = Kind(
    share=2,
    prefixes=4,
    prefix_tokens=(500, 1200),
    turns=(1, 5),
    next_tokens=(30, 200),
    output_tokens=(50, 200),
    think_s=(0.5, 3.0),
)
AGENT = Kind(
    prefixes=2,
    prefix_tokens=(2500, 3500),
    turns=(8, 20),
    first_tokens=(200, 800),
    next_tokens=(100, 600),
    output_tokens=(30, 150),
    think_s=(0.1, 1.0),
)
DOCUMENTS = Kind(prefixes=8, zipf=0.0, prefix_tokens=(3000, 7000), **SHORT)
RAG = Kind(prefixes=40, prefix_tokens=(1000, 4000), **SHORT)
KINDS = {
    "mix": (5.0, 40_960, {"chat": CHAT, "rag": RAG, "one-off": Kind(first_tokens=(50, 2000))}),
    "documents": (6.0, 60_000, {"eight": DOCUMENTS}),
    "documents that do not fit": (6.0, 25_000, {"eight": DOCUMENTS}),
    "agents": (0.6, 80_000, {"agent": AGENT}),
    "hot": (8.0, 60_000, {"one": Kind(prefixes=1, prefix_tokens=(3000, 3000), **SHORT)}),
    "nothing": (6.0, 60_000, {"own": Kind(first_tokens=(200, 3000), output_tokens=(20, 80))}),
}


def traffic(sessions_per_s: float, kinds: dict[str, Kind]) -> Traffic:
    """Half a minute, with hashes like those of tokens."""

    def hashed(block: int) -> int:
        return xxhash.xxh3_64_intdigest(block.to_bytes(8, "little"))

    mix = TrafficMix(sessions_per_s=sessions_per_s, duration_s=40, kinds=kinds, block_size_tokens=BLOCK)
    sessions = [
        replace(one, requests=tuple(replace(ask, blocks=array("Q", map(hashed, ask.blocks))) for ask in one.requests))
        for one in mix.traffic(seed=1).sessions
    ]
    return Traffic(BLOCK, sessions)


def real_share(
    policy: Policy, asked: Traffic, kv_tokens: int, observers: Observers = UNOBSERVED, route_ms: float = 2.0
) -> float:
    fleet = equal_pods(PODS, VirtualPodConfig(speed=speed_of("llama-3.1-70b", "h100x4"), kv_tokens=kv_tokens))
    routers = RouterSettings(observers=observers)
    world = World(
        fleet, policy, Conditions(route_ms=route_ms, scrape_ms=250.0), routers=routers, block_size_tokens=BLOCK
    )
    return cached_share(world.run(asked).outcomes)


@pytest.mark.parametrize("name", KINDS)
def test_other_placements_have_the_caches_that_they_really_would_have(name: str) -> None:
    """Within three points, from the first request on. The estimate by present caches said 28 % where round robin really
    finds 88 %. The real share is a mean: if the router is half a millisecond slower, that of least load may be another
    by two points; of documents that do not fit, by four."""
    per_s, kv_tokens, kinds = KINDS[name]
    policies = load_policies(shipped("policies"))
    asked, metrics = traffic(per_s, kinds), Metrics()
    shadows = ShadowCaches(metrics, lambda _: 1, 400_000, max_followed_per_s=inf)
    recent = RecentDecisions(size=1, on_decided=shadows.decided)

    due_s = 0.0

    def follow(ended: Ended, _prompt: object) -> None:
        nonlocal due_s
        if ended.at_s >= due_s:
            due_s = ended.at_s + FOLLOW_S
            list(shadows.follow())

    real = real_share(policies["cost_aware"], asked, kv_tokens, Observers(recent, Counters(), [shadows.ended, follow]))
    list(shadows.follow())
    cached, prompts = (
        {labels[1]: value for labels, [value] in metrics[what].series().items()}
        for what in (of_decisions.PLACED_CACHED_TOKENS, of_decisions.PLACED_PROMPT_TOKENS)
    )
    shares = {placement: tokens / prompts[placement] for placement, tokens in cached.items()}
    assert shares["chosen"] == pytest.approx(real, abs=0.001)
    assert abs(shadows.watches["m"].error) <= MAX_ERROR
    for placement in ALTERNATIVES:
        expected = fmean(real_share(policies[placement], asked, kv_tokens, route_ms=ms) for ms in (1.5, 2.5))
        allowed = 0.04 if (name, placement) == ("documents that do not fit", "least_load") else 0.03
        assert shares[placement] == pytest.approx(expected, abs=allowed), placement
