"""The centre: what holds of every decision, whatever the scene and the policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import ClientError, FleetError
from router.policy.decide import BYTES_PER_TOKEN, decide, expected_cached_tokens, prompt_token_count
from router.policy.filters import eligible
from router.types import FleetSnapshot, InFlight, PodState, PrefixMatch, PrefixTrust, Role, RouteDecision, Scene
from tests.policy.scenes import BLOCK, MODEL, POLICIES, holding, pod, prompt, ready, request, scene, scenes

policies = st.sampled_from(sorted(POLICIES))


def decision_of(seen: Scene, policy: str) -> RouteDecision | None:
    try:
        return decide(seen, POLICIES[policy])
    except (ClientError, FleetError):
        return None


@settings(max_examples=80)
@given(seen=scenes(), policy=policies)
def test_candidates_are_the_eligible_pods_each_once(seen: Scene, policy: str) -> None:
    """Ready, serving the model, not a prefill pod; none twice and none left out."""
    decision = decision_of(seen, policy)
    if decision is None:
        return
    states = {status.pod: status.state for status in seen.fleet.pods}
    for candidate in decision.candidates:
        assert states[candidate.pod] is PodState.READY
        assert MODEL in candidate.pod.models
        assert candidate.pod.role is not Role.PREFILL
    expected = [status.pod.id for status in eligible(seen, prompt_token_count(seen) if seen.prompt else 0)]
    assert sorted(candidate.pod.id for candidate in decision.candidates) == expected
    assert (decision.policy, decision.version) == (policy, POLICIES[policy].version)
    assert decision.reason


@settings(max_examples=60)
@given(seen=scenes(), policy=policies)
def test_the_explanation_sums_to_the_cost(seen: Scene, policy: str) -> None:
    """Named parts, in the policy's order, that add up to the total."""
    decision = decision_of(seen, policy)
    for candidate in decision.candidates if decision else ():
        assert [name for name, _ in candidate.cost.parts] == [name for name, _ in POLICIES[policy].costs]
        assert candidate.cost.total_ms == pytest.approx(sum(ms for _, ms in candidate.cost.parts))


@settings(max_examples=60)
@given(seen=scenes(), policy=policies)
def test_a_scene_replays_to_the_identical_decision(seen: Scene, policy: str) -> None:
    """Also when its mappings were rebuilt in another order."""
    backwards = replace(
        seen,
        match=PrefixMatch(dict(reversed(list(seen.match.blocks.items())))),
        inflight=dict(reversed(list(seen.inflight.items()))),
        fleet=FleetSnapshot(7, tuple(replace(status) for status in seen.fleet.pods)),
    )
    assert decision_of(seen, policy) == decision_of(backwards, policy)


@settings(max_examples=80)
@given(seen=scenes(), policy=policies, more=st.integers(1, 100), which=st.integers(0, 5))
def test_more_cached_blocks_never_raise_a_cost(seen: Scene, policy: str, more: int, which: int) -> None:
    """Of the pod that holds them; and nobody else's changes."""
    before = decision_of(seen, policy)
    if before is None or seen.prompt is None:
        return
    lucky = before.candidates[which % len(before.candidates)].pod.id
    blocks = min(seen.match.held_blocks(lucky) + more, len(seen.prompt.hashes))
    after = decide(holding(seen, lucky, blocks), POLICIES[policy])
    costs = {candidate.pod.id: candidate.cost.total_ms for candidate in after.candidates}
    for candidate in before.candidates:
        if candidate.pod.id == lucky:
            assert costs[lucky] <= candidate.cost.total_ms + 1e-6
        else:
            assert costs[candidate.pod.id] == candidate.cost.total_ms


@settings(max_examples=80)
@given(
    held=st.integers(0, 80),
    tokens=st.integers(1, 1280),
    engine_block=st.sampled_from([None, 16, 32, 64]),
    trust=st.sampled_from(PrefixTrust),
)
def test_cached_tokens_are_what_the_engine_will_report(
    held: int, tokens: int, engine_block: int | None, trust: PrefixTrust
) -> None:
    """Whole engine blocks, held, short of the whole prompt; nothing where trust is missing; and as many as that."""
    asked = prompt(tokens)
    held = min(held, len(asked.hashes))
    one = pod("a", block_size_tokens=engine_block, trust=trust)
    cached = expected_cached_tokens(holding(scene(*ready(one), prompt=asked), "a", held), one)
    if trust is not PrefixTrust.TRUSTED:
        assert cached == 0
        return
    block = engine_block or BLOCK
    assert cached % block == 0
    assert cached <= held * BLOCK
    assert cached < tokens
    one_more = cached + block
    assert one_more > held * BLOCK or one_more >= tokens


def test_a_prompt_that_could_not_be_read_is_as_long_as_its_body_suggests() -> None:
    """And nothing of it is expected in a cache."""
    one = pod("a")
    seen = scene(*ready(one), prompt=None, request=request(body=b"x" * 4000), match=PrefixMatch({"a": (9, 0, 0, 0)}))
    assert prompt_token_count(seen) == 4000 // BYTES_PER_TOKEN
    (candidate,) = decide(seen, POLICIES["cost_aware"]).candidates
    assert candidate.cached_tokens == 0
    assert dict(candidate.cost.parts)["prefill"] == one.speed.prefill_ms(1000)


def test_waiting_at_the_holder_and_computing_elsewhere_compare_in_milliseconds() -> None:
    """The holder wins until its queue outweighs the prefill that it saves."""
    seen = holding(scene(*ready(pod("cold"), pod("warm")), prompt=prompt(10_000)), "warm", 600)
    saved_ms = pod("cold").speed.prefill_ms(10_000) - pod("warm").speed.prefill_ms(10_000, 9600)
    for queue_ms, winner in ((saved_ms - 5, "warm"), (saved_ms + 5, "cold")):
        waiting = replace(seen, inflight={"warm": InFlight(1, 1, 100, queue_ms, 0)})
        assert decide(waiting, POLICIES["cost_aware"]).candidates[0].pod.id == winner


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_hundred_pods_are_ranked(policy: str) -> None:
    """Every one of them, the ring included."""
    pods = [pod(f"pod-{number:03}") for number in range(100)]
    candidates = decide(holding(scene(*ready(*pods)), "pod-042", 30), POLICIES[policy]).candidates
    assert {candidate.pod.id for candidate in candidates} == {each.id for each in pods}
    assert len(candidates) == 100
