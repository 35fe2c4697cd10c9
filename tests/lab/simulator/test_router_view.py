"""A simulated router believes what the real one would."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from loadtest.simulator.outcome import RequestOutcome
from loadtest.simulator.router_view import Knowledge, RouterSettings, RouterView
from loadtest.simulator.session_turn import SessionTurn, new_context
from loadtest.simulator.traffic import Session, TrafficRequest
from loadtest.simulator.virtual_clock import VirtualClock
from router.admission.tenant import OPEN_TENANT
from router.decision import Candidate, RouteDecision
from router.errors import Overloaded
from router.fleet.fleet import PodEvent
from router.observe.counters import Counters
from router.policy.decide import decide
from router.policy.recording import record
from router.policy.spec import Policy
from router.request.life import Observers
from router.types import PRIOR_OUTPUT_TOKENS, BlockChange, BlockHash, Generation, Links, PodLoad, Scene, Tier
from tests.kit.worlds import equal_pods, small_pod
from tests.policy.test_recording import read, written

PROMPT = [1, 2, 3, 4]
A, B = "pod-000", "pod-001"
GENERATION = Generation(model="m", block_size_tokens=16)


class Scenes(list[tuple[Scene, RouteDecision]]):
    """Records decisions."""

    def record(self, scene: Scene, decision: RouteDecision, policy: Policy, at_s: float, workload: str = "") -> None:
        self.append((scene, decision))


class SilentPods:
    """Pods that respond when a test says so."""

    def attempt(self, turn: SessionTurn, candidate: Candidate) -> None: ...
    def ended(self, turn: SessionTurn, refused: str) -> None: ...


class OneRouter:
    """A router with two pods and blocks of 16 tokens."""

    def __init__(self, policy: Policy, knowledge: Knowledge) -> None:
        pods = [pod.known for pod in equal_pods(2, small_pod(1000)).pods]
        self.clock, self.scenes, self.turns = VirtualClock(), Scenes(), list[SessionTurn]()
        settings = RouterSettings(knowledge=knowledge, observers=Observers(self.scenes, Counters()))
        self.view = RouterView(pods, Links(), policy, settings, None, self.clock, lambda _: None)

    def holds(self, pod: str, blocks: Sequence[BlockHash], tier: Tier = Tier.GPU, *, held: bool = True) -> None:
        self.view.apply_blocks(pod, BlockChange(tier, held, blocks))

    def decided(self, request: TrafficRequest, at_s: float | None = None) -> SessionTurn:
        """A request that had a decision, at the latest time or at another one, and is refused then."""
        turn = self.sent(request, at_s)
        turn.refuse(Overloaded("", 0.0))
        return turn

    def sent(self, request: TrafficRequest, at_s: float | None = None) -> SessionTurn:
        """A request that was sent to its best pod."""
        if at_s is not None:
            self.clock.now_ms = at_s * 1000
        context = new_context(str(len(self.scenes)), "s", OPEN_TENANT, "m", self.clock.now_s)
        outcome = RequestOutcome("any", 0.0, request.prompt_tokens, request.output_tokens)
        turn = SessionTurn(SilentPods(), self.view, context, Session(0.0, (request,)), 0, GENERATION, outcome, {})
        turn.resume()
        self.turns.append(turn)
        return turn

    def by_pod(self, at_s: float | None = None) -> dict[str, Candidate]:
        """The candidates of `PROMPT`."""
        decision = self.decided(prompt(70, PROMPT), at_s).context.decision
        assert decision is not None
        return {one.pod.id: one for one in decision.candidates}

    def best(self, at_s: float | None = None) -> str:
        return next(iter(self.by_pod(at_s)))

    def cached(self, at_s: float | None = None) -> dict[str, int]:
        """The cached tokens of `PROMPT`."""
        return {pod: one.cached_tokens for pod, one in self.by_pod(at_s).items()}


@pytest.fixture
def router(policies: dict[str, Policy]) -> OneRouter:
    """With events."""
    return OneRouter(policies["cost_aware"], Knowledge(predicted_ttl_s=5.0))


def prompt(tokens: int, blocks: Sequence[int], output_tokens: int = 10) -> TrafficRequest:
    return TrafficRequest(tokens, output_tokens, blocks, len(blocks))


def test_lengths_are_learnt_from_finished_answers_and_not_told(router: OneRouter) -> None:
    """The traffic's own length of this answer is unknown to the router. A restart forgets."""
    for number in range(300):
        turn = router.sent(prompt(70, PROMPT, 150), float(number))
        turn.first_token(A)
        turn.complete(A, 0)
    router.decided(prompt(70, PROMPT, 9))
    first, *_, last = [scene.expected_output_tokens for scene, _ in router.scenes]
    assert first == PRIOR_OUTPUT_TOKENS
    assert last == pytest.approx(150, rel=0.05)
    router.view.restart()
    router.decided(prompt(70, PROMPT, 9))
    assert router.scenes[-1][0].expected_output_tokens == PRIOR_OUTPUT_TOKENS


def test_announced_blocks_are_expected(router: OneRouter) -> None:
    """The request goes to their holder."""
    router.holds(B, [1, 2])
    assert router.cached() == {A: 0, B: 32}
    assert router.best() == B


def test_removed_blocks_are_no_more_expected(router: OneRouter) -> None:
    """Block by block and tier by tier."""
    router.holds(B, [1, 2])
    router.holds(B, [1, 2], Tier.CPU)
    router.holds(B, [1, 2], held=False)
    assert router.cached()[B] == 32
    router.holds(B, [2], Tier.CPU, held=False)
    assert router.cached()[B] == 16


def test_a_computed_prompt_is_predicted_until_its_ttl(router: OneRouter) -> None:
    """For `predicted_ttl_s`, 5 s here; and while it is computed."""
    turn = router.sent(prompt(70, PROMPT), at_s=10.0)
    pod = turn.context.decision.candidates[0].pod.id if turn.context.decision else ""
    assert router.cached(at_s=19.0)[pod] == 64
    turn.first_token(pod)
    assert router.cached(at_s=23.9)[pod] == 64
    assert router.cached(at_s=24.1)[pod] == 0


def test_without_events_predictions_last_longer_up_to_the_capacity(policies: dict[str, Policy]) -> None:
    """A minute and three blocks here."""
    knowledge = Knowledge(events=False, no_events_ttl_s=60.0, no_events_capacity_tokens=50)
    router = OneRouter(policies["round_robin"], knowledge)
    for blocks in (PROMPT[:2], [5, 6], [7, 8]):
        turn = router.sent(prompt(32, blocks), at_s=0.0 if blocks == PROMPT[:2] else 59.0)
        turn.first_token(turn.context.candidate.pod.id if turn.context.candidate else "")
    assert sorted(router.cached(at_s=59.5).values()) == [0, 16]
    assert set(router.cached(at_s=120.0).values()) == {0}


def test_load_is_as_old_as_the_last_scrape(policies: dict[str, Policy]) -> None:
    """`least_load` uses the scraped load."""
    router = OneRouter(policies["least_load"], Knowledge())
    busy, idle = PodLoad(running=9, waiting=9, kv_usage=0.9), PodLoad()
    router.view.apply_loads({A: busy, B: idle})
    assert router.best() == B
    router.view.apply_loads({A: idle, B: busy})
    assert router.best() == A


def test_our_own_queued_prompt_is_not_counted_twice(router: OneRouter) -> None:
    """After its answer, a pod that reported it costs no more than an idle pod."""
    idle_ms = router.by_pod()[A].cost.total_ms
    turn = router.sent(prompt(5000, [99]))
    assert turn.context.candidate is not None and turn.context.candidate.pod.id == A
    router.view.apply_loads({A: PodLoad(waiting=1)})
    turn.refuse(Overloaded("", 0.0))
    assert router.by_pod()[A].cost.total_ms == idle_ms
    router.view.apply_loads({A: PodLoad(waiting=1)})
    assert router.by_pod()[A].cost.total_ms > idle_ms


def test_a_restart_drops_all_state(router: OneRouter) -> None:
    """Earlier requests still end in the process that has them."""
    before = router.by_pod()[A].cost.total_ms
    router.holds(A, PROMPT)
    ledger, turn = router.view.ledger, router.sent(prompt(70, PROMPT))
    router.view.restart()
    assert router.cached() == {A: 0, B: 0}
    assert router.by_pod()[A].cost.total_ms == before
    assert ledger.own()
    turn.refuse(Overloaded("", 0.0))
    assert not ledger.own()


def test_a_recording_made_under_congestion_replays_to_the_byte(policies: dict[str, Policy]) -> None:
    """A minute of prompts at twice what the pods compute, which evict what later prompts ask for. Each scene is decided
    again from its lines by the default: the same candidates, prices and order."""
    router = OneRouter(policies["cost_aware"], Knowledge())
    recorded: list[tuple[bytes, tuple[bytes, bytes]]] = []
    for number in range(600):
        head = number % 7 * 1000
        asked = prompt(4000, [*range(head, head + 100), *range(number << 20, (number << 20) + 150)])
        turn = router.sent(asked, number / 10)
        scene, decided = router.scenes[-1]
        pod = decided.candidates[0].pod.id
        recorded.append((msgspec.json.encode(decided), written(record(scene))))
        if number % 2:
            turn.first_token(pod)
        router.holds(pod, list(asked.prompt_hashes))
        router.holds(pod, list(asked.prompt_hashes[number % 5 * 20 :]), held=False)
    assert len({scene.learnt_reuse for scene, _ in router.scenes}) > 5
    assert max(scene.congestion.backlog_ms for scene, _ in router.scenes) > 10_000
    for before, lines in recorded:
        assert msgspec.json.encode(decide(read(lines).scene(), policies["cost_aware"])) == before


def test_first_token_of_the_next_pod_ends_the_prefill_of_a_moved_stream(router: OneRouter) -> None:
    """Until then the pod computes the prompt and the answer so far. Else it would seem busy until the answer ends."""
    turn = router.sent(prompt(70, PROMPT, 500))
    turn.first_token(A)
    router.view.core.state.fleet.event(A, PodEvent.DRAIN, reason="rolling update")
    assert turn.moved(A, prompt(90, PROMPT, 480)) is not None
    on = router.view.ledger.on
    assert (on(B).prefill_tokens, on(B).context_tokens) == (90, 90)
    turn.first_token(B)
    assert (on(B).prefill_tokens, on(B).context_tokens) == (0, 90)
    turn.complete(B, 0)
    assert not router.view.ledger.own()
