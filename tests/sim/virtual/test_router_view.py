"""A simulated router believes what the real one would."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from router.config.index_schema import Index
from router.decision import Candidate, RouteDecision
from router.policy.decide import decide
from router.policy.recording import record
from router.policy.spec import Policy
from router.sim.virtual.router_view import Knowledge, RouterView
from router.sim.virtual.traffic import TrafficRequest
from router.types import PRIOR_OUTPUT_TOKENS, Generation, InFlight, Links, PodLoad, Tier
from tests.policy.test_recording import read, written
from tests.sim.virtual.conftest import equal_pods, small_pod

PROMPT = [1, 2, 3, 4]
A, B = "pod-000", "pod-001"


def view(policy: Policy, knowledge: Knowledge) -> RouterView:
    """A router with two pods and blocks of 16 tokens."""
    pods = [pod.known for pod in equal_pods(2, small_pod()).pods]
    return RouterView(pods, Generation(model="m", block_size_tokens=16), policy, knowledge, Links())


@pytest.fixture
def router(policies: dict[str, Policy]) -> RouterView:
    """With events."""
    return view(policies["cost_aware"], Knowledge(predicted_ttl_s=5.0))


@pytest.fixture
def no_events(policies: dict[str, Policy]) -> RouterView:
    """Without events; assumes 3 cached blocks per pod."""
    return view(policies["cost_aware"], Knowledge(events=False, no_events_ttl_s=60.0, no_events_capacity_tokens=50))


def prompt(tokens: int, blocks: Sequence[int]) -> TrafficRequest:
    return TrafficRequest(tokens, 10, blocks, len(blocks))


def decision(router: RouterView, now_s: float = 0.0) -> RouteDecision:
    return router.decide(router.scene("r", prompt(70, PROMPT), now_s, {}))


def cached_by_pod(router: RouterView, now_s: float = 0.0) -> dict[str, int]:
    return {candidate.pod.id: candidate.cached_tokens for candidate in decision(router, now_s).candidates}


def by_pod(router: RouterView) -> dict[str, Candidate]:
    return {candidate.pod.id: candidate for candidate in decision(router).candidates}


def test_lengths_are_learnt_from_finished_answers_and_not_told(router: RouterView) -> None:
    """The traffic's own length of this answer is unknown to the router. A restart forgets."""
    asked = TrafficRequest(70, 9, PROMPT, len(PROMPT))
    assert router.scene("r", asked, 0.0, {}).expected_output_tokens == PRIOR_OUTPUT_TOKENS
    for _ in range(300):
        router.answered(2000)
    assert router.scene("r", asked, 0.0, {}).expected_output_tokens == pytest.approx(2000, rel=0.05)
    router.restart()
    assert router.scene("r", asked, 0.0, {}).expected_output_tokens == PRIOR_OUTPUT_TOKENS


def test_announced_blocks_are_expected(router: RouterView) -> None:
    """The request goes to their holder."""
    router.apply_blocks(B, Tier.GPU, True, [1, 2])
    assert cached_by_pod(router) == {A: 0, B: 32}
    assert decision(router).candidates[0].pod.id == B


def test_removed_blocks_are_no_more_expected(router: RouterView) -> None:
    """Block by block and tier by tier."""
    router.apply_blocks(B, Tier.GPU, True, [1, 2])
    router.apply_blocks(B, Tier.CPU, True, [1, 2])
    router.apply_blocks(B, Tier.GPU, False, [1, 2])
    assert cached_by_pod(router)[B] == 32
    router.apply_blocks(B, Tier.CPU, False, [2])
    assert cached_by_pod(router)[B] == 16


def test_a_sent_prompt_is_predicted_until_its_ttl(router: RouterView) -> None:
    """For `predicted_ttl_s`, 5 s here."""
    router.record_send(A, prompt(70, PROMPT), 0, now_s=10.0)
    assert cached_by_pod(router, now_s=14.9)[A] == 64
    assert cached_by_pod(router, now_s=15.1)[A] == 0


def test_the_longer_of_predicted_and_announced_match_counts(router: RouterView) -> None:
    """In both orders."""
    router.record_send(A, prompt(32, PROMPT[:2]), 0, now_s=0.0)
    router.apply_blocks(A, Tier.GPU, True, [1])
    assert cached_by_pod(router)[A] == 32
    router.apply_blocks(A, Tier.GPU, True, [2, 3])
    assert cached_by_pod(router)[A] == 48


def test_without_events_predictions_last_longer_up_to_a_capacity(no_events: RouterView) -> None:
    """A minute and three blocks here."""
    no_events.record_send(A, prompt(32, PROMPT[:2]), 0, now_s=0.0)
    assert cached_by_pod(no_events, now_s=59.0)[A] == 32
    no_events.record_send(A, prompt(32, [7, 8]), 0, now_s=59.0)
    assert cached_by_pod(no_events, now_s=59.5)[A] <= 16
    assert cached_by_pod(no_events, now_s=120.0)[A] == 0


def test_work_in_flight_raises_the_price_until_it_is_released(router: RouterView) -> None:
    """The own requests and those of other replicas."""
    idle_ms = by_pod(router)[A].cost.total_ms
    lease = router.record_send(A, prompt(5000, [99]), 0, now_s=0.0)
    booked = router.ledger.own()
    assert by_pod(router)[A].cost.total_ms > idle_ms + 400
    router.ledger.release(lease, 0.0)
    assert by_pod(router)[A].cost.total_ms == idle_ms
    router.apply_replicas([booked], 0.0)
    assert by_pod(router)[A].cost.total_ms > idle_ms + 400


def test_kv_from_a_prefill_pod_adds_no_prefill_work(router: RouterView) -> None:
    """The decode pod will hold the blocks, and no request waits for their compute."""
    router.record_send(A, prompt(70, PROMPT), 0, now_s=0.0, prefills=False)
    assert router.ledger.own() == {A: InFlight(1, 0, 0, 0.0, 70, decode_tokens=70)}
    assert cached_by_pod(router)[A] == 64


def test_load_is_as_old_as_the_last_scrape(policies: dict[str, Policy]) -> None:
    """`least_load` uses the scraped load."""
    router = view(policies["least_load"], Knowledge())
    router.apply_loads(
        {A: PodLoad(running=9, waiting=9, kv_usage=0.9, scraped_at_s=1.0), B: PodLoad(scraped_at_s=1.0)}, 1.0
    )
    assert decision(router, 1.0).candidates[0].pod.id == B
    router.apply_loads(
        {B: PodLoad(running=9, waiting=9, kv_usage=0.9, scraped_at_s=2.0), A: PodLoad(scraped_at_s=2.0)}, 2.0
    )
    assert decision(router, 2.0).candidates[0].pod.id == A


def test_our_own_queued_prompt_is_not_counted_twice(router: RouterView) -> None:
    """After its answer, a pod that reported it costs no more than an idle pod."""
    idle_ms = by_pod(router)[A].cost.total_ms
    lease = router.record_send(A, prompt(5000, [99]), 0, now_s=0.0)
    router.apply_loads({A: PodLoad(waiting=1)}, 0.0)
    router.ledger.release(lease, 0.1)
    assert by_pod(router)[A].cost.total_ms == idle_ms
    router.apply_loads({A: PodLoad(waiting=1)}, 0.2)
    assert by_pod(router)[A].cost.total_ms > idle_ms


def test_a_restart_drops_all_state(router: RouterView) -> None:
    """Earlier leases can still be released."""
    before = by_pod(router)[A].cost.total_ms
    router.apply_blocks(A, Tier.GPU, True, PROMPT)
    ledger, lease = router.ledger, router.record_send(A, prompt(70, PROMPT), 0, now_s=0.0)
    router.restart()
    assert cached_by_pod(router) == {A: 0, B: 0}
    assert by_pod(router)[A].cost.total_ms == before
    ledger.release(lease, 0.0)
    assert not ledger.own()


def test_the_defaults_are_those_of_the_router() -> None:
    """The simulation uses the same values as `serve`."""
    index, knowledge = Index(), Knowledge()
    for name in ("predicted_ttl_s", "no_events_ttl_s", "no_events_capacity_tokens"):
        assert getattr(knowledge, name) == getattr(index, name)


def test_a_recording_made_under_congestion_replays_to_the_byte(policies: dict[str, Policy]) -> None:
    """A minute of prompts at twice what the pods compute, which evict what later prompts ask for. Each scene is decided
    again from its lines by the default: the same candidates, prices and order."""
    router = view(policies["cost_aware"], Knowledge())
    recorded: list[tuple[bytes, tuple[bytes, bytes]]] = []
    learnt, backlogs_ms = set[float](), []
    for number in range(600):
        now_s, head = number / 10, number % 7 * 1000
        asked = prompt(4000, [*range(head, head + 100), *range(number << 20, (number << 20) + 150)])
        scene = router.scene(str(number), asked, now_s, {})
        decided = decide(scene, policies["cost_aware"])
        pod = decided.candidates[0].pod.id
        recorded.append((msgspec.json.encode(decided), written(record(scene))))
        learnt.add(scene.learnt_reuse)
        backlogs_ms.append(scene.congestion.backlog_ms)
        lease = router.record_send(pod, asked, decided.candidates[0].cached_tokens, now_s)
        if number % 2:
            router.ledger.first_token(lease, now_s)
        router.apply_blocks(pod, Tier.GPU, True, list(asked.prompt_hashes))
        router.apply_blocks(pod, Tier.GPU, False, list(asked.prompt_hashes[number % 5 * 20 :]))
    assert len(learnt) > 5 and max(backlogs_ms) > 10_000
    for before, lines in recorded:
        assert msgspec.json.encode(decide(read(lines).scene(), policies["cost_aware"])) == before
