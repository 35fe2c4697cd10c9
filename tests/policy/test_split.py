"""Prefill here, decode there: which pairs there are, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision import Candidate, Direct, Pull, Split
from router.errors import ClientError, FleetError, NoReadyPod
from router.policy.decide import MAX_PODS_PER_SIDE, compatible, decide
from router.policy.price import choice_of, price
from router.policy.spec import Policy
from router.types import InFlight, Link, Links, Pod, PodLoad, PodState, PodStatus, PrefixMatch, PrefixTrust, Role, Scene
from tests.kit.scenes import SPEED, holding, pod, policy, prompt, ready, scene, speeds, works

LINK = Link(1.0, 1e6)
"""1,000 tokens of 1,000 bytes take 2 ms; to compute them takes 20."""
TOKENS = 1601
BY_PRICE = policy("queue", "prefill", "handoff")


def half(name: str, role: Role, **facts: Any) -> Pod:
    """A pod that takes part in handoffs."""
    return pod(name, role=role, **({"handoff": "nixl", "kv_bytes_per_token": 1000} | facts))


def apart(prefill: int = 1, decode: int = 1, **facts: Any) -> tuple[Pod, ...]:
    """`p0`, `p1`, ... and `d0`, `d1`, ..."""
    return (
        *(half(f"p{number}", Role.PREFILL, **facts) for number in range(prefill)),
        *(half(f"d{number}", Role.DECODE, **facts) for number in range(decode)),
    )


def asked(*statuses: PodStatus, **facts: Any) -> Scene:
    usual: dict[str, Any] = {"prompt": prompt(TOKENS), "links": Links(elsewhere=LINK)}
    return scene(*statuses, **(usual | facts))


def pairs(seen: Scene, by: Policy = BY_PRICE) -> dict[tuple[str, str], Candidate]:
    """Splits, by the names of both."""
    found = decide(seen, by).candidates
    return {(each.plan.prefill.id, each.plan.decode.id): each for each in found if isinstance(each.plan, Split)}


def whole(seen: Scene, by: Policy = BY_PRICE) -> dict[str, Candidate]:
    """Requests that one pod serves, by its name."""
    return {each.pod.id: each for each in decide(seen, by).candidates if isinstance(each.plan, Direct)}


# --- who is paired ---


def test_prefill_pods_compute_and_decode_pods_answer() -> None:
    """Every prefill pod with every decode pod; decode pods also alone, prefill pods never."""
    seen = asked(*ready(*apart(2, 2)))
    assert set(pairs(seen)) == {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}
    assert set(whole(seen)) == {"d0", "d1"}


def test_behind_the_split_there_is_a_way_without_it() -> None:
    """What a retry takes when no KV comes: the decode pods compute themselves."""
    busy = {"d0": InFlight(1, 1, prefill_ms=500.0)}
    first, *others = decide(asked(*ready(*apart()), inflight=busy), BY_PRICE).candidates
    assert isinstance(first.plan, Split) and first.pod.id == "d0"
    assert [each.plan for each in others] == [Direct(first.pod)]


def test_a_pod_of_both_roles_may_take_either_side_but_not_both() -> None:
    """It hands nothing over to itself."""
    seen = asked(*ready(half("b", Role.BOTH), *apart(1, 1)))
    assert set(pairs(seen)) == {("b", "d0"), ("p0", "d0"), ("p0", "b")}
    assert set(whole(seen)) == {"b", "d0"}


def test_a_fleet_of_pods_of_both_roles_is_not_split() -> None:
    """There is nobody whose job it is."""
    assert not pairs(asked(*ready(half("a", Role.BOTH), half("b", Role.BOTH))))


@pytest.mark.parametrize(
    ("facts", "fit"),
    [
        *(({}, True), ({"engine": "sglang"}, False), ({"version": "0.9"}, False), ({"front_end": "rust"}, False)),
        ({"handoff": "mooncake"}, False),
    ],
    ids=["alike", "engine", "version", "front end", "dialect"],
)
def test_only_what_understands_one_anothers_kv_is_paired(facts: dict[str, Any], fit: bool) -> None:
    """One engine, one version, one front end, one dialect."""
    prefill, decode = half("p0", Role.PREFILL), half("d0", Role.DECODE, **facts)
    assert compatible(prefill, decode) is fit
    assert bool(pairs(asked(*ready(prefill, decode)))) is fit


@pytest.mark.parametrize("lacking", ["no dialect", "no link", "no size", "no price"])
def test_what_cannot_be_done_or_priced_is_not_planned(lacking: str) -> None:
    """Then decode pods serve whole requests."""
    facts: dict[str, dict[str, Any]] = {"no dialect": {"handoff": ""}, "no size": {"kv_bytes_per_token": 0}}
    pods = apart(**facts.get(lacking, {}))
    seen = asked(*ready(*pods), links=Links() if lacking == "no link" else Links(elsewhere=LINK))
    by = policy("queue", "prefill") if lacking == "no price" else BY_PRICE
    assert not pairs(seen, by)
    assert set(whole(seen, by)) == {"d0"}


def test_of_many_only_the_best_of_either_side_are_paired() -> None:
    """Who has the least to do and holds the most, with who decodes the least."""
    pods = ready(*apart(9, 9))
    inflight = {f"p{number}": InFlight(1, 1, prefill_ms=500.0) for number in range(9) if number not in (2, 5, 7)}
    inflight |= {f"d{number}": InFlight(1, context_tokens=1000) for number in range(9) if number not in (0, 4)}
    full = PodLoad(kv_usage=0.9)
    statuses = [replace(status, load=full) if status.pod.id != "d8" else status for status in pods]
    found = pairs(asked(*statuses, inflight=inflight))
    assert len(found) == MAX_PODS_PER_SIDE**2
    assert {prefill for prefill, _ in found} == {"p2", "p5", "p7"}
    assert {decode for _, decode in found} == {"d0", "d4", "d8"}


# --- what a pair costs ---


def test_the_parts_of_both_sides_are_one_price() -> None:
    """Queue and prefill where it is computed, the handoff, decoding where it is answered; exactly their sum."""
    inflight = {"p0": InFlight(1, 1, prefill_ms=40.0), "d0": InFlight(5, context_tokens=9000)}
    seen = asked(*ready(*apart()), inflight=inflight)
    pair = pairs(seen, policy("decode", "queue", "handoff", "prefill"))["p0", "d0"]
    assert sorted(name for name, _ in pair.cost.parts) == ["decode", "handoff", "prefill", "queue"]
    parts = dict(pair.cost.parts)
    assert parts["queue"] == 40.0
    assert parts["prefill"] == pytest.approx(SPEED.prefill_ms(TOKENS))
    assert parts["handoff"] == pytest.approx(1.0 + TOKENS * 1000 / 1e6)
    assert parts["decode"] == pytest.approx(0.25 * 256 * (0.01 * 5 + 4e-5 * 9000))
    assert pair.cost.total_ms == sum(ms for _, ms in pair.cost.parts)


def test_what_the_decode_pod_holds_itself_is_not_handed_over() -> None:
    """Here the first 1,280 tokens."""
    seen = holding(asked(*ready(*apart(1, 2))), "d1", 80)
    found = pairs(seen)
    handed_over = {decode: dict(pair.cost.parts)["handoff"] for (_, decode), pair in found.items()}
    assert handed_over == {"d0": pytest.approx(1.0 + 1.601), "d1": pytest.approx(1.0 + 0.321)}
    plans = (pair.plan for pair in found.values())
    tokens = {plan.decode.id: plan.handoff_tokens for plan in plans if isinstance(plan, Split)}
    assert tokens == {"d0": TOKENS, "d1": 321}
    assert decide(seen, policy("prefill", "handoff")).candidates[0].cached_tokens == 1280


def test_what_a_decode_pod_finds_in_a_store_is_transferred_all_the_same() -> None:
    """From there or from the prefill pod. What it has in its own tiers is not: the first 1,280 tokens."""
    held = PrefixMatch({"p0": (0, 0, 0, 100), "d0": (0, 0, 0, 100), "d1": (40, 40, 0, 20)})
    found = pairs(asked(*ready(*apart(1, 2)), match=held))
    tokens = {plan.decode.id: plan.handoff_tokens for each in found.values() if isinstance(plan := each.plan, Split)}
    assert tokens == {"d0": TOKENS, "d1": 321}


def test_what_the_prefill_pod_holds_is_what_is_expected_to_be_cached() -> None:
    """It computes only the rest, and hands over all."""
    pair = pairs(holding(asked(*ready(*apart())), "p0", 80))["p0", "d0"]
    assert pair.cached_tokens == 1280
    assert dict(pair.cost.parts)["prefill"] == pytest.approx(SPEED.prefill_ms(TOKENS, 1280))
    assert dict(pair.cost.parts)["handoff"] == pytest.approx(1.0 + 1.601)


def test_a_prefill_pod_that_is_sending_already_takes_longer() -> None:
    """t0 + bytes / B * (1 + k)."""
    found = pairs(asked(*ready(*apart(2)), inflight={"p1": InFlight(pulls=2)}))
    handed_over = [dict(found[prefill, "d0"].cost.parts)["handoff"] for prefill in ("p0", "p1")]
    assert handed_over == [pytest.approx(1.0 + 1.601), pytest.approx(1.0 + 3 * 1.601)]


def test_where_prefill_and_handoff_take_longer_than_computing_there_nothing_is_split() -> None:
    """A queue at the prefill pod moves the request to the decode pod."""
    for queue_ms, split in ((0.0, False), (30.0, True), (60.0, False)):
        inflight = {"p0": InFlight(1, 1, prefill_ms=queue_ms), "d0": InFlight(1, 1, prefill_ms=45.0 if queue_ms else 0)}
        best = decide(asked(*ready(*apart()), inflight=inflight), BY_PRICE).candidates[0]
        assert isinstance(best.plan, Split) is split


def test_a_pod_full_of_running_requests_is_spared_by_a_split() -> None:
    """What others lose by a prefill among them outweighs the handoff."""
    busy = {"d0": InFlight(40, context_tokens=40_000)}
    seen = asked(*ready(*apart()), inflight=busy, links=Links(elsewhere=replace(LINK, t0_ms=20.0)))
    assert isinstance(decide(seen, BY_PRICE).candidates[0].plan, Direct)
    stalling = policy("queue", "prefill", "decode_interference", "handoff")
    assert isinstance(decide(seen, stalling).candidates[0].plan, Split)


# --- where nobody prefills ---


@pytest.mark.parametrize("state", [state for state in PodState if state is not PodState.READY])
def test_without_a_prefill_pod_decode_pods_compute_or_the_request_is_refused(state: PodState) -> None:
    """As the policy says."""
    prefill, decode = apart()
    seen = asked(PodStatus(prefill, state), *ready(decode))
    aggregate, fail = (
        policy("queue", "prefill", "handoff", pd={"on_no_prefill": answer}) for answer in ("aggregate", "fail")
    )
    (only,) = decide(seen, aggregate).candidates
    assert only.plan == Direct(decode)
    with pytest.raises(NoReadyPod, match="No ready prefill pod serves `m`"):
        decide(seen, fail)


def test_prefill_pods_are_required_only_in_a_fleet_with_roles() -> None:
    """A fleet that was never divided is served."""
    fail = policy("queue", "prefill", "handoff", pd={"on_no_prefill": "fail"})
    (only,) = decide(asked(*ready(half("b", Role.BOTH))), fail).candidates
    assert only.pod.id == "b"


# --- any fleet ---


@st.composite
def divided(draw: st.DrawFn) -> Scene:
    """Pods of any role, speed and load, of which each may hold anything."""
    names = [f"pod-{number}" for number in range(draw(st.integers(2, 6)))]
    pods = [
        half(
            name,
            draw(st.sampled_from(Role)),
            speed=draw(speeds),
            engine=draw(st.sampled_from(["vllm", "vllm", "sglang"])),
            handoff=draw(st.sampled_from(["nixl", "nixl", "mooncake", ""])),
            trust=draw(st.sampled_from([PrefixTrust.TRUSTED, PrefixTrust.UNTESTED])),
        )
        for name in names
    ]
    return asked(
        *ready(*pods),
        match=PrefixMatch({name: (draw(st.integers(0, 100)), 0, 0, 0) for name in names}),
        inflight={name: draw(works) for name in names if draw(st.booleans())},
    )


ALL = policy(
    "queue",
    "prefill",
    "hot_prefix_credit",
    "eviction",
    "tier_read",
    "handoff",
    "decode",
    "kv_wait",
    "decode_interference",
)


@given(seen=divided())
def test_every_pair_fits_and_adds_up(seen: Scene) -> None:
    """Nobody prefills who only decodes, nobody answers who only prefills, and there is always a way without a pair."""
    try:
        found = decide(seen, ALL).candidates
    except (ClientError, FleetError):
        return
    assert any(isinstance(each.plan, Direct) for each in found)
    for each in found:
        assert each.cost.total_ms == sum(ms for _, ms in each.cost.parts)
        assert each.pod.role is not Role.PREFILL
        if isinstance(each.plan, Split):
            assert compatible(each.plan.prefill, each.plan.decode)
            assert each.plan.prefill.handoff
            assert each.plan.prefill.role is not Role.DECODE
            assert sorted(name for name, _ in each.cost.parts) == sorted(name for name, _ in ALL.costs)


@given(seen=divided(), which=st.integers(0, 5), more=st.integers(1, 100), layers=st.sampled_from([1, 60]))
def test_more_cached_blocks_never_raise_a_pairs_cost(seen: Scene, which: int, more: int, layers: int) -> None:
    """On either side; what is computed sooner hides less of the handoff, but never more than it saved."""
    lucky = seen.fleet.pods[which % len(seen.fleet.pods)].pod.id
    blocks = min(seen.match.held_blocks(lucky) + more, 100)
    terms: dict[str, Any] = {name: {} for name, _ in ALL.costs} | {"handoff": {"layers": layers}}
    by = policy(costs=terms)
    try:
        before, after = pairs(seen, by), pairs(holding(seen, lucky, blocks), by)
    except (ClientError, FleetError):
        return
    for names in before.keys() & after.keys():
        if lucky in names:
            assert after[names].cost.total_ms <= before[names].cost.total_ms + 1e-6
        else:
            assert after[names].cost == before[names].cost


def test_in_the_middle_of_an_upgrade_pods_that_fit_are_found_behind_better_ones_that_do_not() -> None:
    """The idle ones of both sides are of different versions; each has a busy one to go with."""
    old, new = {"version": "1", "serves_alone": False}, {"version": "2", "serves_alone": False}
    fleet = (
        *(half(f"p{number}", Role.PREFILL, **new) for number in range(3)),
        half("p9", Role.PREFILL, **old),
        *(half(f"d{number}", Role.DECODE, **old) for number in range(3)),
        half("d9", Role.DECODE, **new),
    )
    busy = {"p9": InFlight(1, 1, prefill_ms=500.0), "d9": InFlight(1, context_tokens=1000, decode_tokens=1000)}
    found = pairs(asked(*ready(*fleet), inflight=busy))
    assert {("p9", "d0"), ("p0", "d9")} <= set(found)
    assert all(compatible(pair.plan.prefill, pair.plan.decode) for pair in found.values())  # type: ignore[union-attr]


# --- full decode pods, and equal ones ---

FULL = PodLoad(running=3, waiting=20, kv_usage=0.9, scraped_at_s=1.0)
BY_WAIT = policy("queue", "prefill", "handoff", "kv_wait", "lent_prefill")


def with_full_decode_pods(prompts_per_s: float = 0.0, **facts: Any) -> Scene:
    """One prefill pod, and two decode pods at which twenty prompts wait."""
    pods = apart(1, 2, capacity_tokens=6400, **facts)
    statuses = [PodStatus(one, PodState.READY, FULL if one.role is Role.DECODE else PodLoad()) for one in pods]
    waiting = InFlight(23, 0, context_tokens=23 * 1300, decode_tokens=23 * 1300)
    busy = InFlight(1, 1, prefill_ms=5.0, prompts_per_s=prompts_per_s)
    return asked(*statuses, inflight={"d0": waiting, "d1": waiting, "p0": busy})


def test_while_decode_pods_are_full_a_prefill_pod_answers_alone() -> None:
    """It is the cheapest; a split is the next candidate."""
    first, second, *_ = decide(with_full_decode_pods(), BY_WAIT).candidates
    assert isinstance(first.plan, Direct) and first.pod.id == "p0"
    assert isinstance(second.plan, Split)


def test_a_prefill_pod_with_many_prompts_answers_only_where_others_wait_longer() -> None:
    """Each of its prompts is delayed by a decode step."""
    assert isinstance(decide(with_full_decode_pods(prompts_per_s=1000.0), BY_WAIT).candidates[0].plan, Split)


@pytest.mark.parametrize("reason", ["room", "not priced", "cannot"])
def test_a_prefill_pod_does_not_answer_otherwise(reason: str) -> None:
    """While decode pods have room, with a policy that does not price their wait, and where the engine cannot."""
    seen = asked(*ready(*apart(1, 2, capacity_tokens=10**6))) if reason == "room" else with_full_decode_pods()
    if reason == "cannot":
        seen = with_full_decode_pods(serves_alone=False)
    assert "p0" not in whole(seen, BY_PRICE if reason == "not priced" else BY_WAIT)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_prefill_pod_that_is_full_of_held_kv_gets_no_prompt(is_full: bool) -> None:
    """It computes nothing, and the leases of its KV end late."""
    held = PodLoad(kv_usage=0.99 if is_full else 0.5, scraped_at_s=1.0)
    prefills = [half(f"p{number}", Role.PREFILL, capacity_tokens=6400) for number in range(2)]
    statuses = [PodStatus(prefills[0], PodState.READY, held), *ready(prefills[1], half("d0", Role.DECODE))]
    busy = InFlight(1, 1, prefill_ms=500.0, head_ms=500.0)
    found = pairs(asked(*statuses, inflight={"p1": busy}), policy("queue", "prefill", "handoff", "held_kv"))
    assert (found["p0", "d0"].cost.total_ms > found["p1", "d0"].cost.total_ms) is is_full


def equal_decode_pods(turn: int) -> Scene:
    """One prefill pod, and five decode pods that hold nothing and are slow at prefills."""
    slow = replace(SPEED, c1_ms_per_token=10.0)
    decode = [half(f"d{number}", Role.DECODE, speed=slow) for number in range(5)]
    return asked(*ready(half("p0", Role.PREFILL), *decode), turn=turn)


def test_equal_decode_pods_are_taken_in_turn() -> None:
    """Each gets a fifth, at any rate."""
    first = [decide(equal_decode_pods(turn), BY_PRICE).candidates[0].pod.id for turn in range(50)]
    assert {name: first.count(name) for name in first} == {f"d{number}": 10 for number in range(5)}


def test_a_decode_pod_with_a_part_of_the_prompt_is_preferred_in_every_turn() -> None:
    """The pods among those that are priced."""
    for turn in range(6):
        seen = equal_decode_pods(turn)
        priced = pairs(seen)
        holder = list(priced)[-1][1]
        assert decide(holding(seen, holder, 50), BY_PRICE).candidates[0].pod.id == holder


# --- pulls of the prefill pod ---

PULLING = policy("queue", "prefill", "handoff", "transfer")


@pytest.mark.parametrize(
    ("handoff", "pulls", "fetches"), [("p2p", "p2p", True), ("nixl", "p2p", False), ("p2p", "", False)]
)
def test_a_prefill_pod_pulls_what_the_decode_pod_of_the_last_turn_holds(
    handoff: str, pulls: str, fetches: bool
) -> None:
    """One request carries both, so both must have one dialect. The cheaper of pulling and computing is priced."""
    facts = {"handoff": handoff, "pulls": pulls, "trust": PrefixTrust.TRUSTED}
    seen = holding(asked(*ready(*apart(1, 1, **facts))), "d0", 90)
    found = pairs(seen, PULLING)["p0", "d0"]
    assert found.plan.pull == (Pull("d0", 1440, 1440) if fetches else None)
    assert found.cached_tokens == (1440 if fetches else 0)
    assert price(seen, choice_of(found.plan), PULLING) == found.cost
    assert str(choice_of(found.plan)) == ("p0 < d0 > d0" if fetches else "p0 > d0")


def test_a_prefill_pod_computes_what_is_faster_computed() -> None:
    facts = {"handoff": "p2p", "pulls": "p2p", "trust": PrefixTrust.TRUSTED}
    seen = asked(*ready(*apart(1, 1, **facts)), links=Links(elsewhere=Link(1000.0, 1e6)))
    assert pairs(holding(seen, "d0", 90), PULLING)["p0", "d0"].plan.pull is None
