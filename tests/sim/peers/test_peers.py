"""Properties of every peer. `test_decide.py` checks the properties of every policy, including peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.decision import Direct
from router.errors import ClientError, FleetError
from router.policy.decide import decide
from router.policy.spec import Policy
from router.types import InFlight, Link, Links, Scene
from tests.policy.scenes import POLICIES, request, scenes
from tests.sim.peers.fleets import BLOCKS, IDLE, busy, chosen, decided, fleet

RANDOM_TIES = ("aibrix_prefix_cache", "dynamo", "llm_d", "lmetric", "longest_match", "random", "sglang_cache_aware")
PREFIX_DECIDES_TIES = ("dualmap", "kubeai_chwbl", "mooncake_conductor", "mooncake_local")
PEERS = (*RANDOM_TIES, *PREFIX_DECIDES_TIES)
BLIND_TO_LOAD = {"random", "longest_match"}
PLAIN = Policy("plain", "", POLICIES["mooncake_local"].costs, POLICIES["round_robin"].picker)


@pytest.mark.parametrize("name", PEERS)
def test_the_file_spells_out_the_peers_defaults(name: str) -> None:
    """The YAML contains the defaults of the picker."""
    picker = POLICIES[name].picker
    assert picker == type(picker)()


@settings(max_examples=100)
@given(seen=scenes(linked=False), name=st.sampled_from(PEERS))
def test_prices_and_plans_are_unchanged_without_pulls(seen: Scene, name: str) -> None:
    """A peer only orders candidates; a candidate's price stays the expected time to first token."""
    try:
        expected = decide(seen, PLAIN).candidates
    except (ClientError, FleetError):
        return
    ranked = decide(seen, POLICIES[name]).candidates
    assert sorted(ranked, key=lambda c: c.pod.id) == sorted(expected, key=lambda c: c.pod.id)
    assert all(candidate.plan == Direct(candidate.pod) for candidate in ranked)


@pytest.mark.parametrize("name", RANDOM_TIES)
def test_equal_pods_share_the_requests_evenly(name: str) -> None:
    """On an idle and cold fleet each pod is chosen about equally often, and always the same one for one request."""
    seen = fleet(busy(a=0, b=0, c=0, d=0))
    asked = [structs.replace(seen, request=request(f"r{number}")) for number in range(400)]
    first = [chosen(each, name) for each in asked]
    assert first == [chosen(each, name) for each in asked]
    assert set(first) == set("abcd")
    assert max(Counter(first).values()) < 140


@pytest.mark.parametrize("name", sorted({*PEERS} - BLIND_TO_LOAD))
def test_far_too_much_load_at_the_holder_sends_the_request_elsewhere(name: str) -> None:
    """In any unit of the score."""
    crowded = InFlight(200, 200, prefill_tokens=2_000_000, prefill_ms=60_000.0, context_tokens=3_000_000)
    assert chosen(fleet({"a": crowded, "b": IDLE}, {"a": BLOCKS}), name) == "b"


@pytest.mark.parametrize("name", PEERS)
def test_a_prompt_that_was_not_read_is_placed(name: str) -> None:
    """By load or at random; a link changes nothing, since no cached blocks are known."""
    seen = fleet(busy(a=3, b=1, c=2), prompt=None)
    linked = structs.replace(seen, fleet=replace(seen.fleet, links=Links(elsewhere=Link(0.0, 1e9))))
    assert sorted(candidate.pod.id for candidate in decided(seen, name).candidates) == ["a", "b", "c"]
    assert decided(linked, name) == decided(seen, name)
