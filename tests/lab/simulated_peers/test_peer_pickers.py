"""Worked examples of the peers that rank pods by a score of load and match."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadtest.simulated_peers.peer_pickers import AibrixPrefixCache, Dynamo, LlmD, SglangCacheAware
from router.types import InFlight, PodLoad
from tests.kit.scenes import SPEED, pod, request
from tests.lab.simulated_peers.fleets import BLOCKS, IDLE, busy, chosen, decided, fleet

# --- random ---


def test_neither_load_nor_cache_changes_the_choice() -> None:
    """A retry continues with the next pod."""
    plain = [c.pod.id for c in decided(fleet(dict.fromkeys("abcd", IDLE)), "random").candidates]
    loaded = fleet({**dict.fromkeys("abcd", IDLE), plain[0]: InFlight(requests=99)}, {plain[2]: BLOCKS})
    assert [c.pod.id for c in decided(loaded, "random").candidates] == plain
    assert "".join(plain) in "abcdabcd"


# --- longest match ---


matches = st.lists(st.integers(0, BLOCKS), min_size=1, max_size=6)


@given(held=matches, requests=st.lists(st.integers(0, 500), min_size=6, max_size=6))
def test_the_longest_match_wins_under_any_load(held: list[int], requests: list[int]) -> None:
    """A retry tries the next longest."""
    names = "abcdef"[: len(held)]
    seen = fleet(busy(**dict(zip(names, requests, strict=False))), dict(zip(names, held, strict=True)))
    order = [candidate.pod.id for candidate in decided(seen, "longest_match").candidates]
    assert [held[names.index(name)] for name in order] == sorted(held, reverse=True)


# --- LMetric ---


@pytest.mark.parametrize(("batch", "winner", "score"), [(8, "holder", 7200), (10, "other", 8000)])
def test_the_score_is_new_prefill_tokens_times_batch(batch: int, winner: str, score: int) -> None:
    """A prompt of 1,600 tokens. other: (400 + 1600) * 4 = 8000; holder of 50 blocks: 800 * (batch + 1)."""
    there = {"other": InFlight(3, 1, prefill_tokens=400), "holder": InFlight(batch)}
    decision = decided(fleet(there, {"holder": 50}), "lmetric")
    assert decision.candidates[0].pod.id == winner
    assert decision.reason == f"lowest product, {score}"


# --- Dynamo ---


@pytest.mark.parametrize(("decoding", "winner"), [(1919, "holder"), (1921, "other")])
def test_the_cost_is_prefill_net_of_the_match_plus_decode(decoding: int, winner: str) -> None:
    """A prompt of 1,600 tokens. other: 320 + 1600 + 800 = 2720; holder of 50 blocks: 0 + 800 + its decode tokens."""
    there = {
        "other": InFlight(2, 1, prefill_tokens=320, context_tokens=800),
        "holder": InFlight(2, context_tokens=decoding),
    }
    assert chosen(fleet(there, {"holder": 50}), "dynamo") == winner


def test_the_scale_weighs_prefill_against_decode() -> None:
    """At 2: other 2 * 1600 + 0, holder 2 * 800 + 1500; at 1 the order is reversed."""
    seen = fleet({"holder": InFlight(1, context_tokens=1500), "other": InFlight()}, {"holder": 50})
    assert chosen(seen, "dynamo") == "other"
    assert chosen(seen, "dynamo", Dynamo(prefill_load_scale=2.0)) == "holder"
    assert decided(seen, "dynamo", Dynamo(prefill_load_scale=2.0)).reason == "lowest linear cost, 3100 tokens"


# --- SGLang ---


@pytest.mark.parametrize(
    ("holder", "other", "winner"),
    [
        (42, 10, "holder"),  # 32 apart is not more than 32
        (43, 10, "other"),  # 33 apart, and 43 > 1.1 * 10
        (433, 400, "holder"),  # 33 apart, but 433 <= 1.1 * 400
        (33, 0, "other"),
    ],
)
def test_both_thresholds_must_be_exceeded_to_leave_the_cache(holder: int, other: int, winner: str) -> None:
    """Absolute and relative; then the shortest queue takes it."""
    seen = fleet(busy(holder=holder, other=other), {"holder": 90})
    assert chosen(seen, "sglang_cache_aware") == winner


@pytest.mark.parametrize(("held", "winner"), [(51, "holder"), (50, "small"), (0, "small")])
def test_a_match_must_exceed_the_threshold(held: int, winner: str) -> None:
    """Otherwise the smallest tree takes it: here, the fewest prompt tokens in flight."""
    trees = {"holder": InFlight(1, context_tokens=500), "small": InFlight(2, context_tokens=100)}
    seen = fleet(trees, {"holder": held})
    assert chosen(seen, "sglang_cache_aware") == winner


def test_other_settings_decide_differently() -> None:
    """The defaults of the documentation, 0.3 / 64 / 1.5, choose the holder."""
    seen = fleet(busy(holder=60, other=10), {"holder": 40})
    documented = SglangCacheAware(cache_threshold=0.3, balance_abs_threshold=64, balance_rel_threshold=1.5)
    assert chosen(seen, "sglang_cache_aware") == "other"
    assert chosen(seen, "sglang_cache_aware", documented) == "holder"
    assert decided(seen, "sglang_cache_aware", documented).reason == "balanced: best match"


# --- llm-d ---


CHUNK_MS = SPEED.prefill_ms(8192)
TAU_TOKENS = int(18_000 / CHUNK_MS * 8192)


def waiting(tokens: int) -> InFlight:
    return InFlight(1, 1, prefill_tokens=tokens)


@pytest.mark.parametrize(("ahead", "winner"), [(TAU_TOKENS - 1, "warm"), (TAU_TOKENS + 1, "cold")])
def test_stickiness_ends_at_the_penalty(ahead: int, winner: str) -> None:
    """18 s at the peak prefill speed of the pod's own coefficients, relative to the best other pod."""
    seen = fleet({"warm": waiting(500 + ahead), "cold": waiting(500)}, {"warm": 80})
    assert chosen(seen, "llm_d") == winner


def test_a_slower_pod_is_saturated_by_fewer_tokens() -> None:
    """Each pod's own speed prices its queue."""
    slow = SPEED.__class__(2 * SPEED.c0_ms, 2 * SPEED.c1_ms_per_token, 2 * SPEED.c2_ms_per_token2)
    pods = [pod("cold"), pod("warm", speed=slow)]
    seen = fleet({"warm": waiting(TAU_TOKENS * 6 // 10)}, {"warm": 80}, pods=pods)
    assert chosen(seen, "llm_d") == "cold"


@pytest.mark.parametrize(("held", "winner"), [(80, "holder"), (79, "idle")])
def test_less_than_the_threshold_is_not_warm(held: int, winner: str) -> None:
    """A holder of 79 % competes by token load only, and has 20,000 more."""
    seen = fleet({"holder": waiting(20_000), "idle": InFlight()}, {"holder": held})
    assert chosen(seen, "llm_d") == winner


def test_among_the_warm_the_lowest_token_load_wins() -> None:
    """Uncached tokens in flight plus what this prompt adds: 0 + 320 at 80 %, 200 + 160 at 90 %, 100 + 160 at 90 %."""
    there = {"a": InFlight(), "b": waiting(200), "c": waiting(100), "cold": InFlight()}
    decision = decided(fleet(there, {"a": 80, "b": 90, "c": 90}), "llm_d")
    assert [candidate.pod.id for candidate in decision.candidates] == ["c", "a", "b", "cold"]
    assert decision.reason == "sticky: lowest token load"


def test_a_fleet_of_warm_pods_only_never_saturates() -> None:
    """There is no other pod to compare with."""
    seen = fleet({"a": waiting(9_000_000), "b": waiting(9_000_001)}, {"a": 100, "b": 100})
    assert decided(seen, "llm_d", LlmD(max_ttft_penalty_ms=0.0)).reason == "sticky: lowest token load"


# --- llm-d, weighted ---


@pytest.mark.parametrize(("held", "winner"), [(66, "idle"), (67, "holder")])
def test_a_match_is_weighed_against_the_queue(held: int, winner: str) -> None:
    """3 * match against 2 for the shortest of the queues: two thirds of the prompt are worth it."""
    seen = fleet({"holder": InFlight(9, 9), "idle": InFlight()}, {"holder": held})
    assert chosen(seen, "llm_d_weighted") == winner


def test_equal_queues_leave_match_and_kv_memory() -> None:
    """3 * 0.5 + 2 * (1 - 0.8) + 2 = 3.9 of the holder; 2 * (1 - 0) + 2 = 4 of the empty pod."""
    pods = fleet(dict.fromkeys(("holder", "empty"), InFlight(4, 1)), {"holder": 50})
    status = {one.pod.id: one for one in pods.fleet.pods}
    full = replace(status["holder"], load=PodLoad(kv_usage=0.8))
    seen = structs.replace(pods, fleet=replace(pods.fleet, pods=(status["empty"], full)))
    decision = decided(seen, "llm_d_weighted")
    assert [candidate.pod.id for candidate in decision.candidates] == ["empty", "holder"]
    assert decision.reason == "highest weighted score, 4.00"


# --- AIBrix ---


@pytest.mark.parametrize(("holder", "winner"), [(8, "holder"), (9, "other")])
def test_a_gap_above_eight_leaves_only_the_least_loaded(holder: int, winner: str) -> None:
    """At 8, the holder is at the mean of 4 plus a sigma of 4, which is allowed."""
    assert chosen(fleet(busy(holder=holder, other=0), {"holder": BLOCKS}), "aibrix_prefix_cache") == winner


def test_the_best_match_within_a_sigma_wins() -> None:
    """Requests 8, 4, 3, 3: mean 4.5, sigma 2.06. The best match is above 6.56; the next best is not."""
    seen = fleet(busy(best=8, next=4, c=3, d=3), {"best": 100, "next": 40, "c": 20})
    assert [each.pod.id for each in decided(seen, "aibrix_prefix_cache").candidates] == ["next", "c", "d", "best"]
    assert chosen(seen, "aibrix_prefix_cache", AibrixPrefixCache(standard_deviations=2.0)) == "best"


@pytest.mark.parametrize("name", ["r1", "r2", "r3", "r4", "r5"])
def test_of_equal_matches_the_one_with_fewer_requests_wins(name: str) -> None:
    """Also without any match. The request id does not decide."""
    there = busy(a=3, b=2, c=4)
    assert chosen(fleet(there, {"a": 50, "c": 50}, request=request(name)), "aibrix_prefix_cache") == "a"
    assert chosen(fleet(there, request=request(name)), "aibrix_prefix_cache") == "b"


@given(requests=st.lists(st.integers(0, 40), min_size=1, max_size=6), held=st.lists(st.integers(0, 100), min_size=6))
def test_no_pod_far_above_the_mean_is_chosen(requests: list[int], held: list[int]) -> None:
    """The bound holds, and an imbalance leaves the least loaded only."""
    names = "abcdef"[: len(requests)]
    there = busy(**dict(zip(names, requests, strict=True)))
    won = there[chosen(fleet(there, dict(zip(names, held, strict=False))), "aibrix_prefix_cache")].requests
    mean = sum(requests) / len(requests)
    sigma = (sum((count - mean) ** 2 for count in requests) / len(requests)) ** 0.5
    assert won <= mean + sigma + 1e-9
    assert won == min(requests) or max(requests) - min(requests) <= 8
