"""Every request to a simulated fleet ends correctly, also under failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from loadtest.simulated_peers.peer_admission import EarlyRejectionWorld, SaturationWorld
from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.simulator.admission_rules import Admission, Rule
from loadtest.simulator.compare import Setting, summarize
from loadtest.simulator.generate import Kind, TrafficMix
from loadtest.simulator.outcome import RequestOutcome, Run, figures
from loadtest.simulator.router_view import Knowledge, RouterSettings
from loadtest.simulator.scenario import Conditions, SimulatedFleet, StoreSpec
from loadtest.simulator.traffic import Session, Traffic
from loadtest.simulator.world import World
from router.admission.tenant import Slo, Tenant
from router.errors import ConfigError
from router.policy.spec import Policy
from router.types import AttentionKind, LayerType, Link, Links
from tests.kit.scenes import policy
from tests.kit.worlds import (
    BLOCK,
    DECODING,
    KV_BYTES,
    LINK,
    SPEED,
    apart,
    at,
    fleet,
    prompt,
    small_mix,
    small_pod,
    traffic,
)

SPLITTING = policy("queue", "prefill", "handoff")
POLICIES = sorted(policies_with_peers())
AT_ONCE = Conditions(route_ms=0.0, event_delay_ms=0.0)
"""Routers that decide in no time and receive all events at once."""


def world(of: SimulatedFleet, policy: Policy, conditions: Conditions = AT_ONCE, **more: object) -> World:
    return World(of, policy, conditions, block_size_tokens=BLOCK, **more)  # type: ignore[arg-type]


def outcomes(
    of: SimulatedFleet, policy: Policy, *sessions: Session, conditions: Conditions = AT_ONCE
) -> Sequence[RequestOutcome]:
    return world(of, policy, conditions).run(traffic(*sessions)).outcomes


def assert_all_ended(asked: World, run: Run, requests: int) -> None:
    """Each request ends once, served or refused, and no lease, job or block is left."""
    assert len(run.outcomes) == requests
    for one in run.outcomes:
        assert bool(one.refused) is math.isnan(one.e2e_ms)
        if not one.refused:
            assert 0 < one.ttft_ms <= one.e2e_ms
            assert 0 <= one.cached_tokens < one.prompt_tokens
    assert all(not view.ledger.own() for view in asked.views)
    assert all(pod.load.running == pod.load.waiting == 0 for pod in asked._pods.values())
    assert all(pod.cache.usage == 0.0 for pod in asked._pods.values())


HARD = Conditions(routers=3, route_ms=1.0, event_loss=0.3, exchange_ms=100.0, restarts=((1, 1.0, 0.5),))


@pytest.mark.parametrize("conditions", [AT_ONCE, HARD], ids=["healthy", "hard"])
@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_all_requests_end_and_hits_stay_within_the_ideal(
    policies: dict[str, Policy], name: str, conditions: Conditions
) -> None:
    """With pulls if the policy plans them, too little memory, and a CPU tier."""
    sessions = list(small_mix().traffic(speedup=15.0).sessions)
    rule = Rule.NONE if conditions is AT_ONCE else Rule.QUEUE
    admission, routers = Admission(rule=rule), RouterSettings(slo=Slo(ttft_ms=700.0, tpot_ms=50.0))
    of = fleet(3, small_pod(4000, 9000), LINK)
    asked, progress = world(of, policies[name], conditions, admission=admission, routers=routers), list[int]()
    run = asked.run(Traffic(BLOCK, sessions), progress.append)
    expected = sum(len(session.requests) for session in sessions)
    assert_all_ended(asked, run, expected if conditions is AT_ONCE else len(run.outcomes))
    assert len(sessions) <= len(run.outcomes) <= expected
    assert progress == list(range(1, len(run.outcomes) + 1))
    assert sum(one.cached_tokens for one in run.outcomes) <= run.ideal_cached_tokens
    assert sum(use.requests for use in run.pods.values()) == sum(not one.refused for one in run.outcomes)


def test_the_same_seed_gives_the_identical_run_and_another_seed_does_not(policies: dict[str, Policy]) -> None:
    """Event loss is random, too."""
    seeds = (1, 1, 2)
    lossy = replace(AT_ONCE, event_loss=0.5, regret_every=3)
    one, same, other = (
        repr(world(fleet(3), policies["cost_aware"], lossy, seed=seed).run(small_mix().traffic())) for seed in seeds
    )
    assert one == same
    assert one != other


def test_a_turn_starts_after_the_previous_answer_and_its_think_time(policies: dict[str, Policy]) -> None:
    """Including the overhead of the engine."""
    turns = [replace(prompt(1, 100 * turn, 10), think_s=float(turn)) for turn in (1, 2, 3)]
    conditions = Conditions(overhead_ms=20.0)
    first, second, third = outcomes(fleet(2), policies["cost_aware"], at(5.0, *turns), conditions=conditions)
    assert first.arrived_ms == 5000.0
    assert second.arrived_ms == pytest.approx(first.arrived_ms + first.e2e_ms + 2000)
    assert third.arrived_ms == pytest.approx(second.arrived_ms + second.e2e_ms + 3000)


def test_a_session_ends_when_a_turn_is_refused(policies: dict[str, Policy]) -> None:
    """There is no answer to continue from."""
    too_long = prompt(1, 200_000)
    (refused,) = outcomes(fleet(1), policies["cost_aware"], at(0.0, too_long, prompt(1, 100)))
    assert refused.refused == "does not fit"


def test_requests_that_a_refusal_keeps_from_being_sent_miss_the_slo(policies: dict[str, Policy]) -> None:
    """Two of them, after the refused one; the other session has one request."""
    ended = at(0.0, prompt(1, 200_000), prompt(1, 100), prompt(1, 100))
    run = world(fleet(1), policies["cost_aware"]).run(traffic(ended, at(0.0, prompt(2, 100))))
    assert (len(run.outcomes), run.unsent) == (2, 2)
    assert figures(run, Slo()).slo_share == 0.25


def test_each_tenant_has_its_own_slo_or_that_of_all() -> None:
    """One of three kinds of sessions has its own."""
    tenants = {"a": Tenant(name="a", slo=Slo(ttft_ms=1.0)), "b": Tenant(name="b")}
    outcomes = [RequestOutcome(kind, 0.0, 10, 1, ttft_ms=3.0, e2e_ms=3.0) for kind in ("a", "b", "c", "c")]
    run = Run(outcomes, {}, 1000.0, 0)
    assert summarize(Setting("any", 1.0, 1), run, Slo(ttft_ms=5.0), tenants).figures.slo_share == 0.75


def test_a_first_token_takes_routing_queue_compute_and_overhead(policies: dict[str, Policy]) -> None:
    """As sums, for two requests that arrive together at a pod with one seat."""
    one_seat = fleet(1, small_pod(max_num_seqs=1))
    conditions = Conditions(route_ms=3.0, overhead_ms=20.0)
    sessions = at(1.0, prompt(1, 1000)), at(1.0, prompt(2, 500))
    first, second = outcomes(one_seat, policies["round_robin"], *sessions, conditions=conditions)
    assert first.ttft_ms == pytest.approx(3 + SPEED.prefill_ms(1000) + 20)
    assert second.ttft_ms == pytest.approx(3 + SPEED.prefill_ms(1000) + SPEED.prefill_ms(500) + 20)


# --- knowledge of routers ---


SPACED = TrafficMix(
    sessions_per_s=1.0,
    duration_s=60.0,
    kinds={"chat": Kind(prefixes=4, prefix_tokens=(400, 900), output_tokens=(1, 1), first_tokens=(20, 90))},
    block_size_tokens=BLOCK,
)


def exact_share(
    policy: Policy, conditions: Conditions, kv_tokens: int = 100_000, groups: tuple[LayerType, ...] = (), **knows: bool
) -> float:
    """The share of exact predictions, with one request per second."""
    sessions = [replace(one, start_s=float(second)) for second, one in enumerate(SPACED.traffic().sessions)]
    knowledge, pod = Knowledge(predicted_ttl_s=2.0, **knows), replace(small_pod(kv_tokens), kv_groups=groups)
    asked = world(fleet(3, pod), policy, conditions, routers=RouterSettings(knowledge=knowledge))
    run = asked.run(Traffic(BLOCK, sessions))
    assert_all_ended(asked, run, len(sessions))
    return figures(run, Slo()).predictions_exact_share


@pytest.mark.parametrize("name", ["cost_aware", "round_robin", "dynamo"])
def test_a_router_with_immediate_events_predicts_every_cached_token(policies: dict[str, Policy], name: str) -> None:
    """Even if pods evict, since evictions are events."""
    assert exact_share(policies[name], AT_ONCE) == 1.0
    assert exact_share(policies[name], AT_ONCE, kv_tokens=2000) == 1.0


def test_a_router_that_knows_the_groups_of_layers_predicts_every_cached_token(policies: dict[str, Policy]) -> None:
    """Also after a restart; one that assumes full attention does not."""
    groups = LayerType(AttentionKind.WINDOW, 0, 64), LayerType(AttentionKind.STATE, 0), LayerType(AttentionKind.FULL, 0)
    restarts = replace(AT_ONCE, restarts=((0, 20.5, 0.0),))
    for conditions, kv_tokens in ((AT_ONCE, 100_000), (AT_ONCE, 8000), (restarts, 100_000)):
        assert exact_share(policies["round_robin"], conditions, kv_tokens, groups) == 1.0
    assert exact_share(policies["round_robin"], AT_ONCE, groups=groups, kv_groups=False) < 0.9


def test_groups_of_layers_exclude_a_cpu_tier(policies: dict[str, Policy]) -> None:
    pod = replace(small_pod(cpu_kv_tokens=1000), kv_groups=(LayerType(AttentionKind.FULL, 0),))
    with pytest.raises(ConfigError, match="`cpu_kv_tokens` is not simulated with `kv_groups`"):
        world(fleet(1, pod), policies["round_robin"])


@pytest.mark.parametrize(
    "conditions",
    [
        replace(AT_ONCE, event_loss=0.4),
        replace(AT_ONCE, restarts=((0, 20.5, 15.0),)),
        replace(AT_ONCE, event_delay_ms=4000.0, routers=3, exchange_ms=None),
    ],
    ids=["events are lost", "the router restarts", "events are late and replicas exchange nothing"],
)
def test_a_router_with_fewer_events_predicts_less(policies: dict[str, Policy], conditions: Conditions) -> None:
    """And all requests end."""
    assert exact_share(policies["round_robin"], conditions) < 0.97


def test_late_events_are_bridged_by_predictions(policies: dict[str, Policy]) -> None:
    """One router whose events take a second predicts everything from what it has sent."""
    assert exact_share(policies["round_robin"], replace(AT_ONCE, event_delay_ms=1000.0)) == 1.0


def test_a_restarted_router_reads_the_cpu_tier_as_well(policies: dict[str, Policy]) -> None:
    """Blocks that the GPU evicted are still in the CPU tier."""
    pods = fleet(1, small_pod(2000, cpu_kv_tokens=50_000))
    sessions = at(0.0, prompt(1, 1601)), at(1.0, prompt(2, 1601)), at(9.0, prompt(1, 1601))
    *_, again = outcomes(
        pods, policies["cost_aware"], *sessions, conditions=replace(AT_ONCE, restarts=((0, 5.0, 1.0),))
    )
    assert (again.predicted_cached_tokens, again.cached_tokens) == (1600, 1600)


def test_a_router_without_events_loses_its_predictions_in_a_restart(policies: dict[str, Policy]) -> None:
    """Its predictions came from what it had sent."""
    conditions, no_events = replace(AT_ONCE, restarts=((0, 5.0, 1.0),)), Knowledge(events=False)
    sessions = traffic(at(0.0, prompt(1, 1601)), at(4.0, prompt(1, 1601)), at(9.0, prompt(1, 1601)))
    run = world(fleet(1), policies["cost_aware"], conditions, routers=RouterSettings(knowledge=no_events)).run(sessions)
    assert [one.predicted_cached_tokens for one in run.outcomes] == [0, 1600, 0]
    assert [one.cached_tokens for one in run.outcomes] == [0, 1600, 1600]


def test_a_restart_of_an_unknown_router_is_refused(policies: dict[str, Policy]) -> None:
    """Before the run."""
    with pytest.raises(ConfigError, match="routers are numbered 0 to 0"):
        world(fleet(1), policies["cost_aware"], replace(AT_ONCE, restarts=((1, 1.0, 1.0),)))


def test_replicas_see_the_work_of_others_only_if_they_exchange_it(policies: dict[str, Policy]) -> None:
    """Two requests to two routers: on two pods with the exchange, else on the same pod."""
    sessions = at(1.0, prompt(1, 8000)), at(1.2, prompt(2, 8000))
    pods = {
        exchange_ms: [
            one.pod
            for one in outcomes(
                fleet(2),
                policies["cost_aware"],
                *sessions,
                conditions=Conditions(routers=2, exchange_ms=exchange_ms, scrape_ms=1e6),
            )
        ]
        for exchange_ms in (50.0, None)
    }
    assert len(set(pods[50.0])) == 2
    assert len(set(pods[None])) == 1


def test_regret_is_the_delay_beyond_the_best_pod(policies: dict[str, Policy]) -> None:
    """Round robin sends the second request past the pod that holds it; `cost_aware` does not."""
    sessions = at(0.0, prompt(1, 1601)), at(5.0, prompt(1, 1601))
    conditions = replace(AT_ONCE, regret_every=1)
    blind, seeing = (
        outcomes(fleet(2), policies[name], *sessions, conditions=conditions)[1]
        for name in ("round_robin", "cost_aware")
    )
    assert blind.regret_ms == pytest.approx(SPEED.prefill_ms(1601) - SPEED.prefill_ms(1601, 1600))
    assert seeing.regret_ms == 0.0


# --- refusals ---


def test_a_request_that_would_wait_too_long_is_refused_and_misses_the_slo() -> None:
    """By early rejection. Later requests are served, and the ideal counts only prompts that were computed."""
    burst = [at(0.0, prompt(number, 4000)) for number in range(4)]
    routers = RouterSettings(slo=Slo(ttft_ms=1000.0))
    asked = EarlyRejectionWorld(fleet(1), policy("queue", "prefill"), AT_ONCE, routers=routers, block_size_tokens=BLOCK)
    run = asked.run(traffic(*burst, at(60.0, prompt(3, 4000))))
    assert_all_ended(asked, run, 5)
    assert [one.refused for one in run.outcomes] == ["", "", "overloaded", "overloaded", ""]
    found = figures(run, Slo())
    assert (found.refused, found.slo_share, found.ideal_cached_tokens) == (2, 0.6, 0)


def test_requests_wait_while_every_pod_is_saturated_and_are_refused_past_their_deadline() -> None:
    """By llm-d's rule. Of 60 long prompts, too many a second, the first are sent and, when the pod has caught up, the
    last are sent."""
    routers = RouterSettings(slo=Slo(ttft_ms=2000.0))
    asked = SaturationWorld(fleet(1), policy("queue"), AT_ONCE, routers=routers, block_size_tokens=BLOCK)
    run = asked.run(traffic(*(at(0.1 * number, prompt(number, 4000)) for number in range(60))))
    assert_all_ended(asked, run, 60)
    refused = [one.refused for one in run.outcomes]
    assert set(refused) == {"", "overloaded"}
    assert not refused[0] and not refused[-1]


@pytest.mark.parametrize("name", ["cost_aware", "mooncake_conductor"])
def test_a_prompt_that_fits_into_no_pod_is_refused(policies: dict[str, Policy], name: str) -> None:
    """Its lease is released, and the others are served."""
    asked = world(fleet(2, link=LINK), policies[name])
    run = asked.run(traffic(at(0.0, prompt(1, 100_001)), at(0.1, prompt(2, 500))))
    assert_all_ended(asked, run, 2)
    assert [one.refused for one in run.outcomes] == ["does not fit", ""]


# --- transfers ---


def test_a_prefill_pod_hands_the_kv_over_before_the_first_token(policies: dict[str, Policy]) -> None:
    """Prefill, then t0 + bytes / bandwidth, then the last token of the prompt on the decode pod."""
    asked = world(apart(1, 1), policies["cost_aware"])
    run = asked.run(traffic(at(0.0, prompt(1, 5000, output_tokens=11))))
    assert_all_ended(asked, run, 1)
    (one,) = run.outcomes
    link_ms = LINK.transfer_ms(5000 * KV_BYTES)
    assert one.ttft_ms == pytest.approx(SPEED.prefill_ms(5000) + link_ms + DECODING.prefill_ms(5000, 4999))
    assert one.e2e_ms > one.ttft_ms + 10 * SPEED.d0_ms
    assert [use.computed_tokens for use in run.pods.values()] == [5000, 1]
    assert [use.requests for use in run.pods.values()] == [1, 1]


def test_prefill_and_handoff_are_predicted_together() -> None:
    """Without the last token, which the decode pod computes."""
    (one,) = outcomes(apart(1, 1), SPLITTING, at(0.0, prompt(1, 5000, output_tokens=2)))
    assert one.predicted_ms == pytest.approx(SPEED.prefill_ms(5000) + LINK.transfer_ms(5000 * KV_BYTES))
    assert one.ttft_ms == pytest.approx(one.predicted_ms + DECODING.prefill_ms(5000, 4999))


def test_blocks_on_the_decode_pod_are_not_handed_over_again() -> None:
    """Nor are they computed again on the prefill pod."""
    turns = at(0.0, prompt(1, 1601, 2), replace(prompt(1, 3201, 2), think_s=1.0))
    _, second = outcomes(apart(1, 1), SPLITTING, turns)
    link_ms = LINK.transfer_ms(1601 * KV_BYTES)
    assert (second.cached_tokens, second.predicted_cached_tokens) == (1600, 1600)
    assert second.ttft_ms == pytest.approx(SPEED.prefill_ms(3201, 1600) + link_ms + DECODING.prefill_ms(3201, 3200))


def test_an_answer_of_one_token_is_not_handed_over(policies: dict[str, Policy]) -> None:
    """The prefill pod has computed it already."""
    run = world(apart(1, 1), policies["cost_aware"]).run(traffic(at(0.0, prompt(1, 5000))))
    assert run.outcomes[0].ttft_ms == pytest.approx(SPEED.prefill_ms(5000))
    assert [use.requests for use in run.pods.values()] == [1, 0]


def test_decode_pods_compute_only_last_tokens(policies: dict[str, Policy]) -> None:
    """One for every request that was handed over, under mixed traffic; prefill pods decode nothing."""
    asked = world(apart(2, 2), policies["cost_aware"])
    run = asked.run(small_mix().traffic())
    assert_all_ended(asked, run, len(run.outcomes))
    handed_over = sum(one.output_tokens > 1 for one in run.outcomes)
    decoding = list(run.pods.values())[2:]
    assert sum(use.computed_tokens for use in decoding) == sum(use.requests for use in decoding) == handed_over
    assert all(use.requests for use in run.pods.values())
    assert sum(one.cached_tokens for one in run.outcomes) > 0


def test_a_faster_decode_pod_serves_the_request_alone() -> None:
    """With equal pods, the idle decode pod needs no handoff."""
    run = world(apart(1, 1, decoding=SPEED), SPLITTING).run(traffic(at(0.0, prompt(1, 5000, 2))))
    assert [use.requests for use in run.pods.values()] == [0, 1]
    assert run.outcomes[0].ttft_ms == pytest.approx(SPEED.prefill_ms(5000))


def test_a_prefill_pod_is_free_again_after_the_handoff() -> None:
    """Nothing is in flight there during the decode: the next request has the same price as the first."""
    sessions = at(0.0, prompt(1, 1000, 2000)), at(5.0, prompt(2, 1000, 2)), at(6.0, prompt(3, 1000, 2))
    long, *others = world(apart(1, 1), SPLITTING).run(traffic(*sessions)).outcomes
    assert long.e2e_ms > 10_000
    assert {one.predicted_ms for one in others} == {long.predicted_ms}


def test_a_handoff_in_progress_counts_at_its_sender() -> None:
    """A second one from there is expected to take twice as long: 527 ms of compute, 500 ms of transfer."""
    slow = Link(0.0, 10_000.0)
    sessions = at(0.0, prompt(1, 5000, 2)), at(0.8, prompt(2, 1000, 2)), at(5.0, prompt(3, 1000, 2))
    _, meanwhile, later = outcomes(apart(1, 1, slow), SPLITTING, *sessions)
    assert later.predicted_ms == pytest.approx(SPEED.prefill_ms(1000) + slow.transfer_ms(1000 * KV_BYTES))
    assert meanwhile.predicted_ms == pytest.approx(later.predicted_ms + slow.transfer_ms(1000 * KV_BYTES))


def test_prefill_pods_without_a_link_are_refused(policies: dict[str, Policy]) -> None:
    """The KV could not be transferred."""
    with pytest.raises(ConfigError, match="need a `link`"):
        world(apart(1, 1, link=None), policies["cost_aware"])


def test_prefill_pods_need_a_policy_that_prices_handoffs(policies: dict[str, Policy]) -> None:
    """Other policies never use the prefill pods."""
    with pytest.raises(ConfigError, match="policy least_load has no cost term `handoff`"):
        world(apart(1, 1), policies["least_load"])


def pull(policy: Policy, kv_tokens: int) -> RequestOutcome:
    """One pod computes a prompt, both compute another one, the first gets busy, and then the prompt is sent again by a
    router that receives no evictions."""
    long_ttl = Knowledge(predicted_ttl_s=1e6)
    conditions = replace(AT_ONCE, event_delay_ms=1e9)
    sessions = [at(0.0, prompt(1, 2001)), at(10.0, prompt(2, 4300)), at(10.0, prompt(3, 4300))]
    sessions += [at(20.0, prompt(1, 4300)), at(20.1, prompt(1, 2050))]
    asked = world(fleet(2, small_pod(kv_tokens), LINK), policy, conditions, routers=RouterSettings(knowledge=long_ttl))
    run = asked.run(traffic(*sessions))
    assert_all_ended(asked, run, 5)
    return run.outcomes[-1]


def test_a_pull_brings_what_the_holder_has(policies: dict[str, Policy]) -> None:
    """Only the rest is computed."""
    found = pull(policies["mooncake_conductor"], kv_tokens=100_000)
    assert (found.pulled_tokens, found.cached_tokens) == (2000, 2000)
    assert found.ttft_ms == pytest.approx(LINK.transfer_ms(2000 * KV_BYTES) + SPEED.prefill_ms(2050, 2000))


def test_a_pull_from_a_holder_that_evicted_the_blocks_is_recomputed(policies: dict[str, Policy]) -> None:
    """Nothing is transferred or cached, and the prediction of all 128 blocks was wrong."""
    found = pull(policies["mooncake_conductor"], kv_tokens=4310)
    assert (found.pulled_tokens, found.cached_tokens) == (0, 0)
    assert found.predicted_cached_tokens == 2048
    assert found.ttft_ms == pytest.approx(SPEED.prefill_ms(2050))


def test_a_cpu_tier_keeps_what_the_gpu_evicted(policies: dict[str, Policy]) -> None:
    """Four prompts in turn, of which two fit: without the tier nothing is cached, with it everything is.
    The tier loads at the rate of the PCIe bus."""
    sessions = [at(float(second), prompt(second % 4, 1601)) for second in range(8)]
    (*_, without), (*_, tier) = (
        outcomes(fleet(1, small_pod(4000, cpu_kv_tokens)), policies["cost_aware"], *sessions)
        for cpu_kv_tokens in (0, 100_000)
    )
    assert (without.cached_tokens, tier.cached_tokens) == (0, 1600)
    assert without.ttft_ms == pytest.approx(SPEED.prefill_ms(1601))
    loaded_ms = 1600 * KV_BYTES / fleet(1).pods[0].pcie_bytes_per_ms
    assert tier.ttft_ms == pytest.approx(loaded_ms + SPEED.prefill_ms(1601, 1600))


@pytest.mark.parametrize(("answers", "cached"), [(True, 2192), (False, 1984)], ids=["answers", "prompts alone"])
def test_a_prefill_pod_reads_from_a_store_what_a_decode_pod_has_written(answers: bool, cached: int) -> None:
    """Whole blocks of a prompt of 1,990 tokens, which it holds itself, and of an answer of 210, as expected."""
    first = replace(prompt(1, 2200), prompt_tokens=1990, output_tokens=210, prompt_blocks=1990 // BLOCK)
    links = Links(elsewhere=LINK, remote=LINK)
    of = replace(apart(1, 1), store=StoreSpec(kv_tokens=10_000, answers=answers), believed_links=links)
    by_price = policy("queue", "prefill", "tier_read", "handoff")
    _, again = outcomes(of, by_price, at(0.0, first, replace(prompt(1, 2300, 2), think_s=1.0)))
    assert (again.predicted_cached_tokens, again.cached_tokens) == (cached, cached)


@pytest.mark.parametrize(
    "of",
    [
        replace(fleet(1), store=StoreSpec(kv_tokens=1)),
        replace(fleet(1, small_pod(cpu_kv_tokens=1000), LINK), store=StoreSpec(kv_tokens=1)),
    ],
    ids=["no link", "a tier of its own"],
)
def test_a_store_that_cannot_be_simulated_is_refused(policies: dict[str, Policy], of: SimulatedFleet) -> None:
    with pytest.raises(ConfigError, match="a `store`"):
        world(of, policies["cost_aware"])


def test_a_tier_too_small_for_a_prompt_announces_only_what_it_keeps(policies: dict[str, Policy]) -> None:
    """Blocks written and evicted in one step are not announced, so the prediction is exact."""
    sessions = at(0.0, prompt(1, 1601)), at(40.0, prompt(2, 1601)), at(80.0, prompt(1, 1601))
    *_, again = outcomes(fleet(1, small_pod(1700, cpu_kv_tokens=500)), policies["cost_aware"], *sessions)
    assert (again.predicted_cached_tokens, again.cached_tokens) == (96, 96)
