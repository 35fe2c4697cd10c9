"""What holds for every decision, for any scene and policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.decision import Candidate, Cost, Direct, RouteDecision, Split
from router.errors import ClientError, FleetError
from router.policy.decide import decide, expected_ttft_ms
from router.policy.eligible import eligible
from router.policy.plans import BYTES_PER_TOKEN, FORM_BYTES_PER_TOKEN, MAX_UNREAD_TOKENS, Planner, prompt_token_count
from router.policy.recording import record
from router.policy.term import Costs
from router.types import Endpoint, InFlight, PodState, PrefixMatch, Role, Scene
from tests.kit.scenes import (
    BLOCK,
    MODEL,
    POLICIES,
    SPEED,
    holding,
    pod,
    policy,
    prompt,
    ready,
    request,
    scene,
    scenes,
)

names = st.sampled_from(sorted(POLICIES))


def decision_of(seen: Scene, name: str) -> RouteDecision | None:
    try:
        return decide(seen, POLICIES[name])
    except (ClientError, FleetError):
        return None


@given(seen=scenes(), name=names)
def test_candidates_are_ways_that_are_open_each_once(seen: Scene, name: str) -> None:
    """On pods that are ready and serve the model, in the role that they have; without links every pod there is."""
    decision = decision_of(seen, name)
    if decision is None:
        return
    pods = eligible(seen, prompt_token_count(seen) if seen.prompt else 0)
    direct, prefill, decode = ([status.pod for status in side] for side in (pods.direct, pods.prefill, pods.decode))
    whole = [each.plan.pod for each in decision.candidates if isinstance(each.plan, Direct)]
    pairs = [each.plan for each in decision.candidates if isinstance(each.plan, Split)]
    assert len({each.id for each in whole}) == len(whole) == min(len(direct), POLICIES[name].shortlist or len(direct))
    assert all(each in direct for each in whole)
    assert len({(each.prefill.id, each.decode.id) for each in pairs}) == len(pairs)
    assert all(each.prefill in prefill and each.decode in decode for each in pairs)
    assert (decision.policy, decision.version) == (name, POLICIES[name].version)
    assert decision.reason


@given(seen=scenes(), name=names)
def test_the_chosen_pods_are_ready_and_serve_the_model(seen: Scene, name: str) -> None:
    """A prefill pod does not answer, and a decode pod does not compute for another."""
    decision = decision_of(seen, name)
    if decision is None:
        return
    states = {status.pod: status.state for status in seen.fleet.pods}
    plan = decision.candidates[0].plan
    for chosen in (plan.prefill, plan.decode) if isinstance(plan, Split) else (plan.pod,):
        assert states[chosen] is PodState.READY
        assert MODEL in chosen.models
    assert plan.pod.role is not Role.PREFILL
    assert not isinstance(plan, Split) or plan.prefill.role is not Role.DECODE


@given(seen=scenes(), name=names)
def test_the_explanation_sums_to_the_cost(seen: Scene, name: str) -> None:
    """Every term of the policy once, in parts that add up to the total."""
    decision = decision_of(seen, name)
    terms = [name for name, _ in POLICIES[name].costs]
    for candidate in decision.candidates if decision else ():
        parts = [name for name, _ in candidate.cost.parts]
        assert (parts if isinstance(candidate.plan, Direct) else sorted(parts, key=terms.index)) == terms
        assert candidate.cost.total_ms == pytest.approx(sum(ms for _, ms in candidate.cost.parts), abs=1e-6)


@given(seen=scenes(), name=names)
def test_a_scene_replays_to_the_identical_decision(seen: Scene, name: str) -> None:
    """Also when its mappings were rebuilt in another order."""
    backwards = structs.replace(
        seen,
        match=PrefixMatch(dict(reversed(list(seen.match.blocks.items())))),
        inflight=dict(reversed(list(seen.inflight.items()))),
        fleet=replace(seen.fleet, version=7, pods=tuple(replace(status) for status in seen.fleet.pods)),
    )
    assert decision_of(seen, name) == decision_of(backwards, name)


@given(seen=scenes(linked=False), name=names, more=st.integers(1, 100), which=st.integers(0, 5))
def test_more_cached_blocks_never_raise_a_cost(seen: Scene, name: str, more: int, which: int) -> None:
    """The pod that holds them costs the same or less, and no other's cost changes. Where KV moves: test_plans.py and
    test_split.py."""
    before = decision_of(seen, name)
    if before is None or seen.prompt is None:
        return
    lucky = before.candidates[which % len(before.candidates)].pod.id
    blocks = min(seen.match.held_blocks(lucky) + more, len(seen.prompt.hashes))
    after = decide(holding(seen, lucky, blocks), POLICIES[name])
    costs = {candidate.pod.id: candidate.cost.total_ms for candidate in after.candidates}
    for candidate in before.candidates:
        if candidate.pod.id == lucky:
            assert costs[lucky] <= candidate.cost.total_ms + 1e-6
        else:
            assert costs[candidate.pod.id] == candidate.cost.total_ms


def test_a_prompt_that_could_not_be_read_is_as_long_as_its_body_suggests() -> None:
    """And nothing of it is expected in a cache."""
    one = pod("a")
    seen = scene(*ready(one), prompt=None, request=request(body=b"x" * 4000), match=PrefixMatch({"a": (9, 0, 0, 0)}))
    assert prompt_token_count(seen) == 4000 // BYTES_PER_TOKEN
    (candidate,) = decide(seen, POLICIES["cost_aware"]).candidates
    assert candidate.cached_tokens == 0
    assert dict(candidate.cost.parts)["prefill"] == one.speed.prefill_ms(1000)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b"--form" + bytes(25 * 2**20), 25 * 2**20 // FORM_BYTES_PER_TOKEN),
        (b"{" + bytes(25 * 2**20), MAX_UNREAD_TOKENS),
    ],
    ids=["form", "json"],
)
def test_a_body_with_audio_or_pictures_is_a_bounded_amount_of_work(body: bytes, tokens: int) -> None:
    """In a recorded scene, too."""
    seen = scene(*ready(pod("a")), prompt=None, request=request(body=body))
    assert prompt_token_count(seen) == prompt_token_count(record(seen).scene()) == tokens


def test_tokens_to_decode_are_no_work_for_the_gpu() -> None:
    """/detokenize looks them up."""
    asked = request(endpoint=Endpoint.DETOKENIZE, body=b"x" * 4000)
    assert prompt_token_count(scene(*ready(pod("a")), prompt=None, request=asked)) == 0


def test_waiting_at_the_holder_and_computing_elsewhere_compare_in_milliseconds() -> None:
    """The holder wins until its queue outweighs the prefill that it saves."""
    seen = holding(scene(*ready(pod("cold"), pod("warm")), prompt=prompt(10_000)), "warm", 600)
    saved_ms = pod("cold").speed.prefill_ms(10_000) - pod("warm").speed.prefill_ms(10_000, 9600)
    for queue_ms, winner in ((saved_ms - 5, "warm"), (saved_ms + 5, "cold")):
        waiting = structs.replace(seen, inflight={"warm": InFlight(1, 1, 100, queue_ms, 0)})
        assert decide(waiting, policy("queue", "prefill")).candidates[0].pod.id == winner


def test_a_queue_that_is_being_worked_on_draws_the_request_back() -> None:
    """The same scene, later: what the holder has computed meanwhile no longer speaks against it."""
    seen = holding(scene(*ready(pod("cold"), pod("warm")), prompt=prompt(10_000)), "warm", 600)
    inflight = {"warm": InFlight(1, 1, 100, prefill_ms=1000.0, head_ms=1000.0, head_since_s=50.0)}
    chosen = [
        decide(structs.replace(seen, inflight=inflight, now_s=now_s), policy("queue", "prefill")).candidates[0].pod.id
        for now_s in (50.0, 50.9)
    ]
    assert chosen == ["cold", "warm"]


def test_of_a_price_the_client_waits_for_what_is_no_concern_of_others() -> None:
    """Its own queue, prefill and transfers; not what it displaces, stalls or is given credit for."""
    parts = {
        "queue": 1.0,
        "hot_prefix_credit": -500.0,
        "prefill": 10.0,
        "eviction": 7000.0,
        "transfer": 100.0,
        "decode_interference": 9.0,
    }
    assert expected_ttft_ms(Cost.of(tuple(parts.items()), sum(parts.values()))) == 111.0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_hundred_pods_are_ranked(name: str) -> None:
    """Every one of them, the ring included; or as many as the shortlist holds, with the holder among them."""
    pods = [pod(f"pod-{number:03}") for number in range(100)]
    candidates = decide(holding(scene(*ready(*pods)), "pod-042", 30), POLICIES[name]).candidates
    ids = {candidate.pod.id for candidate in candidates}
    assert len(ids) == len(candidates) == (POLICIES[name].shortlist or 100)
    assert "pod-042" in ids and ids <= {each.id for each in pods}


def of_equal_speed(draw: st.DrawFn) -> Scene:
    """Pods whose tokens all take as long, whose running requests cost nothing, and that hold no very last token."""
    ids = [f"pod-{number}" for number in range(draw(st.integers(2, 9)))]
    tokens = draw(st.integers(1, 3000))
    held = {each: (draw(st.integers(0, (tokens - 1) // BLOCK)), 0, 0, 0) for each in ids if draw(st.booleans())}
    queues = {each: InFlight(1, 1, prefill_ms=draw(st.floats(0, 200))) for each in ids if draw(st.booleans())}
    linear = replace(SPEED, c2_ms_per_token2=0.0, d1_ms_per_request=0.0)
    pods = [pod(each, speed=linear) for each in ids]
    return scene(*ready(*pods), prompt=prompt(tokens), match=PrefixMatch(held), inflight=queues)


@given(seen=st.composite(of_equal_speed)(), most=st.integers(1, 9))
def test_of_queue_and_prefill_a_shortlist_loses_nothing(seen: Scene, most: int) -> None:
    """Its glance sees all that they do."""
    full, short = (decide(seen, policy("queue", "prefill", shortlist=limit)).candidates for limit in (0, most))
    assert short[0].cost.total_ms == pytest.approx(full[0].cost.total_ms, abs=2e-3)
    assert len(short) == min(most, len(full))


@given(seen=scenes(linked=False), most=st.integers(1, 6))
def test_a_shortlist_loses_no_more_than_its_glance_leaves_out(seen: Scene, most: int) -> None:
    """This holds for any policy: two pods that look alike differ by what was not looked at."""
    terms = ("queue", "prefill", "hot_prefix_credit", "eviction", "decode", "kv_wait", "decode_interference")
    try:
        full, short = (decide(seen, policy(*terms, shortlist=limit)).candidates for limit in (0, most))
    except (ClientError, FleetError):
        return
    left_out_ms = [each.cost.total_ms - glance_ms(seen, each, policy(*terms).costs) for each in full]
    lost_ms = short[0].cost.total_ms - full[0].cost.total_ms
    assert -2e-3 <= lost_ms <= max(left_out_ms) - min(left_out_ms) + 2e-3


def glance_ms(seen: Scene, candidate: Candidate, costs: Costs) -> float:
    """Outstanding work, and the prompt less what is held, at what a missing token costs on the first pod there is."""
    tokens, speed = prompt_token_count(seen), candidate.pod.speed
    held_tokens = seen.match.held_blocks(candidate.pod.id) * BLOCK
    work = seen.inflight.get(candidate.pod.id, InFlight())
    first = eligible(seen, tokens if seen.prompt else 0).direct[0].pod
    weight = Planner(seen, tokens).missing_weight(first, costs)
    queue_ms = work.queue_ms(seen.now_s) + work.requests * speed.d1_ms_per_request
    return queue_ms + weight * speed.c1_ms_per_token * (tokens - held_tokens)


def test_a_long_prompt_is_worth_waiting_for_by_its_quadratic_part() -> None:
    """100,000 held tokens save 6 s, of which attention is 4: at a glance, too, no queue of 5 s hides that."""
    queue = {"held": InFlight(1, 1, prefill_ms=5000.0)}
    seen = holding(scene(*ready(pod("cold"), pod("held")), prompt=prompt(100_001), inflight=queue), "held", 6250)
    (best,) = decide(seen, policy("queue", "prefill", shortlist=1)).candidates
    assert best.pod.id == "held"


def test_an_answer_of_any_length_has_a_price() -> None:
    """Clients may ask for more tokens than a float can hold."""
    seen = scene(*ready(pod("a")), request=request(max_output_tokens=10**400))
    assert decide(seen, POLICIES["cost_aware"]).candidates[0].cost.total_ms < 1e9
