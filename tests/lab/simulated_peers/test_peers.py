"""Properties of every peer and of the functions that their formulas share; only simulations may use them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadtest.simulated_peers.peer_pickers import (
    PEER_PICKERS,
    inflight_of,
    library_with_peers,
    lowest_first,
    match_share,
    policies_with_peers,
    random_index,
    uncached_tokens,
)
from router.config.load import shipped
from router.config.policy_files import PolicyFolder, load_policies
from router.decision import Candidate, Direct
from router.errors import ClientError, ConfigError, FleetError
from router.policy.decide import decide
from router.policy.spec import Policy
from router.types import InFlight, Link, Links, PrefixTrust, Scene
from tests.kit.scenes import POLICIES, pod, prompt_of, request, scene, scenes
from tests.lab.simulated_peers.fleets import BLOCKS, IDLE, TOKENS, busy, chosen, decided, fleet

# --- every peer ---


RANDOM_TIES = (
    "aibrix_prefix_cache",
    "dynamo",
    "llm_d",
    "llm_d_weighted",
    "lmetric",
    "longest_match",
    "random",
    "sglang_cache_aware",
)
PREFIX_DECIDES_TIES = ("dualmap", "kubeai_chwbl", "mooncake_conductor", "mooncake_local")
PEERS = (*RANDOM_TIES, *PREFIX_DECIDES_TIES)
BLIND_TO_LOAD = {"random", "longest_match", "llm_d_weighted"}
"""For `llm_d_weighted`, a match of the whole prompt weighs more than the longest queue."""
PLAIN = Policy("plain", "", POLICIES["mooncake_local"].costs, POLICIES["round_robin"].picker)


@pytest.mark.parametrize("name", PEERS)
def test_the_file_spells_out_the_peers_defaults(name: str) -> None:
    """The YAML contains the defaults of the picker."""
    picker = POLICIES[name].picker
    assert picker == type(picker)()


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


# --- shared functions ---


def candidates_of(seen: Scene) -> list[Candidate]:
    """In the order of their ids."""
    return sorted(decide(seen, POLICIES["round_robin"]).candidates, key=lambda candidate: candidate.pod.id)


def test_a_match_is_a_share_of_the_prompts_full_blocks() -> None:
    """A fully held prompt is 1, although an engine computes its last block again."""
    seen = fleet(busy(a=0, b=0, c=0), {"a": BLOCKS, "b": 25})
    a, b, c = candidates_of(seen)
    assert [match_share(seen, each) for each in (a, b, c)] == [1.0, 0.25, 0.0]
    assert [uncached_tokens(seen, each) for each in (a, b, c)] == [16, TOKENS - 400, TOKENS]


@pytest.mark.parametrize("trust", [PrefixTrust.UNTESTED, PrefixTrust.MISMATCH])
def test_an_untrusted_pod_matches_nothing(trust: PrefixTrust) -> None:
    """Even if the index has its blocks."""
    seen = fleet(busy(a=0), {"a": BLOCKS}, pods=[pod("a", trust=trust)])
    (only,) = candidates_of(seen)
    assert match_share(seen, only) == 0.0
    assert uncached_tokens(seen, only) == TOKENS


def test_a_prompt_without_blocks_is_at_least_one_token() -> None:
    """Not read, or shorter than a block."""
    for asked, tokens in ((None, 1), (prompt_of([]), 1), (prompt_of([7] * 5), 5)):
        seen = fleet(busy(a=0), prompt=asked)
        (only,) = candidates_of(seen)
        assert match_share(seen, only) == 0.0
        assert uncached_tokens(seen, only) == tokens


def test_a_pod_without_an_entry_is_idle() -> None:
    """The ledger lists only pods with work."""
    seen = fleet(busy(a=0, b=4))
    a, b = candidates_of(seen)
    assert inflight_of(fleet({}, pods=[a.pod, b.pod]), a) == InFlight()
    assert inflight_of(seen, b).requests == 4


@given(scores=st.lists(st.integers(0, 3), min_size=1, max_size=8), name=st.text(min_size=1, max_size=8))
def test_the_lowest_comes_first_and_the_rest_ascends(scores: list[int], name: str) -> None:
    """Each candidate stays in the list."""
    seen = fleet(busy(**{f"p{number}": score for number, score in enumerate(scores)}), request=request(name))
    ranked = lowest_first(seen, candidates_of(seen), lambda candidate: inflight_of(seen, candidate).requests)
    assert [inflight_of(seen, each).requests for each in ranked] == sorted(scores)
    assert len({each.pod.id for each in ranked}) == len(scores)


def test_only_the_lowest_scores_are_shuffled() -> None:
    """Each of the two is first about equally often, the third never."""
    pods = busy(a=1, b=2, c=1)
    first: Counter[str] = Counter()
    for number in range(200):
        seen = fleet(pods, request=request(f"r{number}"))
        ranked = lowest_first(seen, candidates_of(seen), lambda candidate: pods[candidate.pod.id].requests)
        first[ranked[0].pod.id] += 1
    assert set(first) == {"a", "c"}
    assert min(first.values()) > 70


def test_a_random_index_is_below_the_count_and_reproducible() -> None:
    """It depends on the request id only."""
    lots = [random_index(scene(request=request(f"r{number}")), 7) for number in range(100)]
    assert set(lots) == set(range(7))
    assert lots == [random_index(scene(request=request(f"r{number}"), turn=3), 7) for number in range(100)]


# --- policy files ---


MINE = "name: mine\nabout: x\npicker: {dynamo: {prefill_load_scale: 2}}\n"


def test_serve_refuses_a_peers_picker(tmp_path: Path) -> None:
    """As any unknown key."""
    (tmp_path / "mine.yaml").write_text(MINE)
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: picker\.dynamo: unknown key"):
        PolicyFolder(tmp_path, "mine").read()


def test_a_simulated_policy_may_use_and_extend_a_peers(tmp_path: Path) -> None:
    """With other settings."""
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "eager.yaml").write_text("name: eager\nabout: x\nextends: llm_d\nshortlist: 3\n")
    shelf = library_with_peers(tmp_path)
    assert repr(shelf.policy("mine").picker) == "Dynamo(prefill_load_scale=2.0)"
    assert shelf.policy("eager").picker == POLICIES["llm_d"].picker


def test_every_peer_has_a_policy_and_ours_keep_their_version() -> None:
    """A simulated decision carries the version that the router would give it."""
    policies, ours = policies_with_peers(), load_policies(shipped("policies"))
    assert {type(policy.picker) for policy in policies.values()} >= set(PEER_PICKERS.values())
    shelf = library_with_peers()
    assert {name: shelf.policy(name).version for name in ours} == {
        name: policy.version for name, policy in ours.items()
    }
