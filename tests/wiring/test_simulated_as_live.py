"""A simulated request is decided, predicted, queued and recorded as a live one.

Some minutes of traffic are simulated. Then the same requests go through a core that is built as `serve` builds it, with
the shipped policies, real metrics and recent decisions, by a front in memory. It receives the loads, KV events, steps
and tokens of the simulated pods at the same virtual times, and nothing of what the simulated router decided.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from loadtest.simulator.admission_rules import Admission, Rule
from loadtest.simulator.router_view import HashStore, RouterSettings, RouterView
from loadtest.simulator.scenario import Conditions, SimulatedFleet
from loadtest.simulator.session_turn import pause
from loadtest.simulator.virtual_clock import VirtualClock
from loadtest.simulator.world import World
from router.admission.admission_queue import AdmissionConfig, AdmissionQueue
from router.admission.fair_order import Waiting
from router.admission.tenant import Slo
from router.config.load import shipped
from router.config.models import slo_lookup
from router.config.policy_files import PolicyFolder, load_classes
from router.config.schema import ModelConfig, RouterConfig
from router.decision import Candidate, RouteDecision, Split
from router.errors import RouterError
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.observe.counters import Counters
from router.observe.ended import Ended, RecordedDecision
from router.observe.log import RequestLog
from router.observe.metrics import Metrics
from router.observe.recent_decisions import RecentDecisions
from router.phases import Phases
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.classes import Classes
from router.policy.policy_set import PolicySet
from router.policy.recording import record
from router.policy.spec import Policy
from router.request.context import RequestContext
from router.request.decisions import Routing
from router.request.effects import Downstream, Effects, Turns
from router.request.fleet_state import Clock, FleetState
from router.request.inbound import HeaderList
from router.request.life import Core, Observers
from router.request.tracker import Tracker
from router.types import BlockChange, InferenceRequest, PodId, PodLoad, PromptPrefix, Scene
from router.wiring.router import build_core, observers
from tests.kit.worlds import BLOCK, LINK, apart, fleet, small_mix, small_pod
from tests.policy.test_recording import written

SLO = Slo(ttft_ms=700.0, tpot_ms=50.0, idle_prefills=3.0)


@dataclass(slots=True)
class Records:
    """What a core did: its decisions and what they were based on, and how its requests ended."""

    scenes: list[Scene] = field(default_factory=list)
    decisions: list[RouteDecision] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    recent: RecentDecisions | None = None

    def record(
        self, scene: Scene, decision: RouteDecision, policy: Policy, at_s: float, workload: str = ""
    ) -> RecordedDecision | None:
        self.scenes.append(scene)
        self.decisions.append(decision)
        return self.recent.record(scene, decision, policy, at_s, workload) if self.recent else None

    def settle(self, ended: Ended, _prompt: PromptPrefix | None) -> None:
        self.ended.append(ended)


# --- the simulated router, and what reaches it ---

Event = tuple[float, str, tuple[Any, ...]]


class TapedTracker:
    """Records what a pod sends."""

    def __init__(self, tracker: Tracker, tape: Callable[..., None]) -> None:
        self._tracker = tracker
        self._tape = tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def handed_over(self, now_s: float) -> None:
        self._tape("handed_over", self._tracker.context.handed_over_cached_tokens)
        self._tracker.handed_over(now_s)

    def head(self, pod: PodId, status: int, headers: HeaderList, now_s: float) -> None:
        self._tape("head", pod, status, headers)
        self._tracker.head(pod, status, headers, now_s)

    def piece(self, piece: bytes, now_s: float) -> bytes:
        self._tape("piece", piece)
        return self._tracker.piece(piece, now_s)

    def rest(self, now_s: float) -> bytes:
        self._tape("rest")
        return self._tracker.rest(now_s)

    def complete(self, now_s: float) -> None:
        self._tracker.complete(now_s)


class TapedCore(Core):
    """Records arrivals."""

    tape: Callable[..., None]

    async def serve(self, context: RequestContext, client: Downstream, do: Effects) -> None:
        self.tape("arrive", context.request, context)
        await super().serve(context, client, do)

    def tracker(self, context: RequestContext) -> Tracker:
        return cast(Tracker, TapedTracker(super().tracker(context), partial(self._tape_of, context.request.id)))

    def _tape_of(self, request_id: str, name: str, *values: object) -> None:
        self.tape(name, request_id, *values)


class TapedView(RouterView):
    """Records what reaches a simulated router."""

    tape: list[Event]

    def restart(self) -> None:
        super().restart()
        self.tape = []
        core = TapedCore.__new__(TapedCore)
        vars(core).update(vars(self.core), tape=self._record)
        self.core = core

    def apply_blocks(self, pod: PodId, change: BlockChange) -> None:
        self._record("blocks", pod, change)
        super().apply_blocks(pod, change)

    def apply_loads(self, loads: dict[PodId, PodLoad]) -> None:  # type: ignore[override]
        self._record("loads", loads)
        super().apply_loads(loads)

    def apply_step(self, pod: PodId, began_s: float) -> None:
        self._record("step", pod, began_s)
        super().apply_step(pod, began_s)

    def _record(self, name: str, *values: object) -> None:
        self.tape.append((self._clock.now_ms, name, values))


class TapedWorld(World):
    """A simulation with a tape."""

    view_class = TapedView


def simulated(of: SimulatedFleet, policy: Policy, load: float) -> tuple[Records, list[Event]]:
    """Traffic beyond what the fleet can serve, and the tape of its only router."""
    records = Records()
    settings = RouterSettings(observers=Observers(records, Counters(), (records.settle,)), slo=SLO)
    admission = Admission(rule=Rule.QUEUE)
    world = TapedWorld(of, policy, Conditions(), routers=settings, block_size_tokens=BLOCK, admission=admission)
    world.run(small_mix(100.0).traffic(speedup=load))
    view = world.views[0]
    assert isinstance(view, TapedView)
    return records, view.tape


# --- a live core, and a front in memory ---


def core_of(of: SimulatedFleet, policies: PolicySet, clock: Clock, records: Records) -> Core:
    """The core as `serve` builds it, with a store of hashes: simulated prompts have no tokens."""
    metrics, live = Metrics(), Fleet(of.believed_links)
    pods = [replace(pod.known, capacity_tokens=pod.true.kv_tokens) for pod in of.pods]
    live.sync(pods)
    for pod in pods:
        live.trust(pod.id, pod.trust, "")
        live.event(pod.id, PodEvent.PROBE_OK)
    state = FleetState(
        fleet=live,
        ledger=Ledger(),
        breaker=Breaker(live),
        store=HashStore(pods[0].base_model),
        calibrator=Calibrator(Calibration(), metrics, of.believed_links),
    )
    config = RouterConfig(admission=AdmissionConfig(), models=(ModelConfig(name=pods[0].base_model, slo=SLO),))
    records.recent = RecentDecisions()
    recording = observers(metrics, records.recent, RequestLog("json", write=lambda _line: None))
    recording = Observers(records, recording.counters, (*recording.sinks, records.settle))
    routing = Routing(lambda: policies, Classes(load_classes(None)), slo_lookup(config))
    return build_core(
        config,
        state,
        routing,
        recording,
        clock,
        handoff_facts=lambda _pod, _dialect: {},
        publishes_events=lambda _pod: True,
    )


@dataclass(eq=False)
class TapedLife:
    """One request, and what it waits for; client and front at once."""

    front: TapeFront
    context: RequestContext
    prompt: PromptPrefix
    tracker: Tracker | None = None
    started = disconnected = was_slow = False

    def __post_init__(self) -> None:
        self._life = self.front.core.serve(self.context, cast(Downstream, self), cast(Effects, self))

    def resume(self, error: Exception | None = None) -> None:
        with suppress(StopIteration, RouterError):
            if error is None:
                self._life.send(None)
            else:
                self._life.throw(error)

    async def tokens(self, request: InferenceRequest) -> PromptPrefix:
        return self.prompt

    async def turn(self, queue: AdmissionQueue, one: Waiting) -> None:
        self.front.waiting[one] = self
        self.front.send_in(queue, self)
        await pause()

    def go(self, one: Waiting, error: Exception | None) -> None:
        self.front.waiting.pop(one).resume(error)

    async def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> None:
        self.tracker = tracker
        await pause()


class TapeFront:
    """Plays a tape to a core."""

    def __init__(self, core: Core, clock: VirtualClock) -> None:
        self.core = core
        self._clock = clock
        self._lives: dict[str, TapedLife] = {}
        self.waiting: dict[Waiting, TapedLife] = {}
        self._call = 0

    def play(self, tape: list[Event]) -> None:
        for at_ms, name, values in tape:
            self._clock.call_at(at_ms, getattr(self, f"_{name}"), *values)
        while self._clock.next_ms < float("inf"):
            self._clock.run_next()

    def send_in(self, queue: AdmissionQueue, turns: Turns, wait_ms: float = 0.0) -> None:
        self._call += 1
        if wait_ms < float("inf"):
            self._clock.call_in(wait_ms, self._send_next, queue, turns, self._call)

    def _send_next(self, queue: AdmissionQueue, turns: Turns, call: int) -> None:
        if call == self._call and queue:
            assert self.core.queues is not None
            self.send_in(queue, turns, self.core.queues.send_next(queue, self._clock.now_s, turns))

    # --- feeds ---

    def _blocks(self, pod: PodId, change: BlockChange) -> None:
        store = self.core.state.store
        assert isinstance(store, HashStore)
        store.apply_blocks(pod, change)

    def _loads(self, loads: dict[PodId, PodLoad]) -> None:
        for pod, load in loads.items():
            ours = self.core.state.ledger.on(pod).prefill_requests
            self.core.state.fleet.observe_load(pod, replace(load, our_prompts=ours))

    def _step(self, pod: PodId, began_s: float) -> None:
        self.core.state.ledger.stepped(pod, began_s)

    # --- requests ---

    def _arrive(self, request: Any, simulated: RequestContext) -> None:
        context = RequestContext(request, simulated.head, Phases(self._clock.now_s), simulated.tenant)
        assert simulated.prompt is not None
        life = self._lives[request.id] = TapedLife(self, context, simulated.prompt)
        life.resume()

    def _tracker(self, request_id: str) -> Tracker:
        tracker = self._lives[request_id].tracker
        assert tracker is not None
        return tracker

    def _handed_over(self, request_id: str, cached_tokens: int) -> None:
        self._lives[request_id].context.handed_over_cached_tokens = cached_tokens
        self._tracker(request_id).handed_over(self._clock.now_s)

    def _head(self, request_id: str, pod: PodId, status: int, headers: HeaderList) -> None:
        self._tracker(request_id).head(pod, status, headers, self._clock.now_s)

    def _piece(self, request_id: str, piece: bytes) -> None:
        self._tracker(request_id).piece(piece, self._clock.now_s)

    def _rest(self, request_id: str) -> None:
        tracker = self._tracker(request_id)
        tracker.rest(self._clock.now_s)
        tracker.complete(self._clock.now_s)
        self._lives.pop(request_id).resume()


@pytest.mark.parametrize(
    ("of", "load"),
    [(fleet(3, small_pod(20_000, 40_000), LINK), 2.5), (apart(1, 2), 6.0)],
    ids=["pods that do both, with pulls and a CPU tier", "prefill and decode pods"],
)
def test_a_build_core_decides_predicts_and_records_what_was_simulated(of: SimulatedFleet, load: float) -> None:
    """All of about 500 requests: what was known, candidates, prices, cached tokens, times, refusals, usage."""
    policies = PolicyFolder(shipped("policies"), "cost_aware", load_classes(None).names).read()
    expected, tape = simulated(of, policies.default, load)
    found, clock = Records(), VirtualClock()
    core = core_of(of, policies, Clock(lambda: clock.now_s, lambda: clock.now_s), found)
    TapeFront(core, clock).play(tape)

    assert len(expected.ended) > 400
    results = {one.result for one in expected.ended}
    assert results == {"ok", "overloaded"}
    served = [one.served for one in expected.ended if one.served]
    assert any(one.cached_tokens for one in served)
    assert any(isinstance(one.plan, Split) or one.plan.pull for one in served)
    assert len(expected.scenes) > len(expected.ended) + 50, "some waited, and were decided again"

    for before, now in zip(expected.scenes, found.scenes, strict=True):
        assert written(record(now)) == written(record(before))
    assert msgspec.json.encode(found.decisions) == msgspec.json.encode(expected.decisions)
    unrecorded = [msgspec.structs.replace(one, decision=None) for one in found.ended]
    assert unrecorded == expected.ended
    assert not core.state.ledger.own()
