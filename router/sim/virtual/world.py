"""What happens when this traffic meets this fleet under this policy?

Arrivals, pod steps and transfers on one virtual clock. The pods hold the true state; each router has its own view of
it (`view_updates.py`). The same seed gives the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

from router.decision import Pull, RouteDecision, Split
from router.errors import ConfigError
from router.policy.decide import expected_ttft_ms
from router.policy.spec import Policy
from router.sim.virtual.admission_rules import Admission, FleetActions, rule_of
from router.sim.virtual.link_sharing import LinkSharing
from router.sim.virtual.outcome import PodUse, RequestOutcome, Run
from router.sim.virtual.router_view import Knowledge, RouterView
from router.sim.virtual.scenario import Conditions, SimulatedFleet
from router.sim.virtual.session_turn import SessionTurn
from router.sim.virtual.traffic import IdealCache, Session, Traffic, TrafficRequest
from router.sim.virtual.view_updates import ViewUpdates
from router.sim.virtual.virtual_clock import VirtualClock
from router.sim.virtual.virtual_job import Job, Progress
from router.sim.virtual.virtual_pod import VirtualPod, current_steps
from router.types import Generation, PodId, PodLoad, Scene

OnProgress: TypeAlias = Callable[[int], None]
"""Called with the number of requests that have ended."""


def ignore_progress(_: int) -> None:
    """The default callback."""


class World:
    """One fleet, one policy and some routers. `run` may be called once."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: Policy,
        conditions: Conditions,
        *,
        knowledge: Knowledge | None = None,
        block_size_tokens: int,
        seed: int = 0,
        admission: Admission | None = None,
    ) -> None:
        _check(fleet, policy, conditions)
        knowledge = knowledge or Knowledge()
        generation = Generation(model=fleet.pods[0].known.models[0], block_size_tokens=block_size_tokens)
        # an engine reports its capacity, so a router knows it
        known = [replace(pod.known, capacity_tokens=pod.true.kv_tokens) for pod in fleet.pods]
        links = fleet.believed_links
        self._conditions = conditions
        self._link = fleet.link
        self._fleet = {pod.known.id: pod for pod in fleet.pods}
        self._speeds = {pod.true.speed for pod in fleet.pods}
        self._pods = {pod.known.id: VirtualPod(pod.true, block_size_tokens) for pod in fleet.pods}
        self.views = [RouterView(known, generation, policy, knowledge, links) for _ in range(conditions.routers)]
        self._next_router = cycle(range(conditions.routers))
        self._clock = clock = VirtualClock()
        self._updates = ViewUpdates(
            self.views, self._pods, conditions, clock, self._goes_on, has_events=knowledge.events, seed=seed
        )
        self._admission = admission or Admission()
        actions = FleetActions(
            *(self._decide, self._dispatch, self._refuse, clock.call_in, self._loads, lambda: clock.now_ms)
        )
        self._rules = [rule_of(self._admission, actions, conditions.routers) for _ in self.views]
        self._transfers = LinkSharing(self._bandwidths())
        self._versions = dict.fromkeys(self._pods, 0)
        self._last_start_ms = 0.0
        self._unsent = 0
        self._running = 0
        self._scheduled = 0
        """Sessions and turns that will arrive."""
        self._uses = dict.fromkeys(self._pods, 0)
        self._outcomes: list[RequestOutcome] = []
        self._backlogs_ms: list[list[float]] = []
        self._ideal = IdealCache(block_size_tokens)
        self._ideal_cached_tokens = 0
        self._sessions: Iterator[Session] = iter(())
        self._on_progress: OnProgress = ignore_progress

    def run(self, traffic: Traffic, on_progress: OnProgress = ignore_progress) -> Run:
        """Simulate from the first arrival to the last token."""
        self._sessions, self._on_progress = iter(traffic.sessions), on_progress
        self._schedule_next_session()
        self._updates.start()
        if self._conditions.backlog_every_ms:
            self._clock.call_at(0.0, self._record_backlogs, self._conditions.backlog_every_ms)
        while (due_ms := min(self._clock.next_ms, self._transfers.next_ms)) < math.inf:
            if due_ms < self._transfers.next_ms:
                self._clock.run_next()
                continue
            self._clock.now_ms = due_ms
            for on_arrival in self._transfers.advance(due_ms):
                on_arrival()
        ended_ms = max((one.arrived_ms + one.e2e_ms for one in self._outcomes if not one.refused), default=0.0)
        uses = {
            pod_id: PodUse(self._uses[pod_id], pod.computed_tokens, pod.busy_ms, pod.preemptions)
            for pod_id, pod in self._pods.items()
        }
        return Run(
            self._outcomes,
            uses,
            ended_ms,
            self._ideal_cached_tokens,
            self._backlogs_ms,
            self._last_start_ms,
            self._unsent,
        )

    def _loads(self) -> list[PodLoad]:
        return [pod.load for pod in self._pods.values()]

    def _bandwidths(self) -> dict[Any, float]:
        places: dict[Any, float] = {("pcie", pod_id): pod.pcie_bytes_per_ms for pod_id, pod in self._fleet.items()}
        if self._link:
            for pod_id in self._fleet:
                places["send", pod_id] = places["receive", pod_id] = self._link.bytes_per_ms
        return places

    # --- arrivals ---

    def _schedule_next_session(self) -> None:
        session = next(self._sessions, None)
        if session is not None:
            self._schedule_turn(session.start_s * 1000, session, 0)

    def _schedule_turn(self, when_ms: float, session: Session, number: int) -> None:
        self._scheduled += 1
        self._clock.call_at(when_ms, self._arrive, session, number)

    def _arrive(self, session: Session, number: int) -> None:
        self._scheduled -= 1
        if number == 0:
            self._last_start_ms = self._clock.now_ms
            self._schedule_next_session()
        request = session.requests[number]
        outcome = RequestOutcome(session.kind, self._clock.now_ms, request.prompt_tokens, request.output_tokens)
        outcome.idle_prefill_ms = min(speed.prefill_ms(request.prompt_tokens) for speed in self._speeds)
        self._outcomes.append(outcome)
        router = next(self._next_router)
        view, tenant = self.views[router], self._admission.tenant_of(session.kind)
        self._running += 1
        rule, request_id = self._rules[router], str(len(self._outcomes))
        rule.arrive(SessionTurn(request_id, session, number, tenant, outcome, view, view.ledger, rule.answered))

    def _decide(self, turn: SessionTurn, counted: bool) -> tuple[Scene, RouteDecision]:
        """What the router knows, and its decision. `counted`: count the prompt as requested."""
        self._updates.deliver_events()
        view, now_s = turn.view, self._clock.now_s
        turn.ledger = view.ledger  # a router that restarts has a new one
        steps = current_steps(self._pods, view.ledger.steps(), self._clock.now_ms)
        scene = view.scene(turn.id, turn.request, now_s, steps, repr(turn.session.start_s), counted=counted)
        return scene, view.decide(scene)

    def _refuse(self, turn: SessionTurn, reason: str) -> None:
        turn.outcome.refused = reason
        turn.outcome.waited_ms = self._clock.now_ms - turn.outcome.arrived_ms
        self._end(turn)

    def _dispatch(self, turn: SessionTurn, decision: RouteDecision) -> None:
        self._ideal_cached_tokens += self._ideal.serve(turn.request)
        best, outcome, view = decision.candidates[0], turn.outcome, turn.view
        outcome.waited_ms = self._clock.now_ms - outcome.arrived_ms
        outcome.pod, outcome.predicted_ms = best.pod.id, expected_ttft_ms(best.cost)
        outcome.predicted_cached_tokens = best.cached_tokens
        every = self._conditions.regret_every
        if every and len(self._outcomes) % every == 0:
            outcome.regret_ms = self._regret_ms(turn.request, best.pod.id)
        plan = best.plan
        first = plan.prefill if isinstance(plan, Split) else best.pod
        now_s = self._clock.now_s
        turn.prefill = view.record_send(first.id, turn.request, best.cached_tokens, now_s)
        if isinstance(plan, Split) and turn.request.output_tokens > 1:
            turn.decode = view.record_send(plan.decode.id, turn.request, 0, now_s, prefills=False)
        self._clock.call_in(self._conditions.route_ms, self._send, turn, first.id, plan.pull)

    def _regret_ms(self, request: TrafficRequest, chosen: PodId) -> float:
        """Computed from the true cache and queue of each pod, without pulls."""
        expected: dict[PodId, float] = {}
        for pod_id in self.views[0].pods:
            pod = self._pods[pod_id]
            prefill_ms = pod.config.speed.prefill_ms(request.prompt_tokens, pod.held_tokens(request))
            expected[pod_id] = pod.backlog_ms() + prefill_ms
        return expected[chosen] - min(expected.values())

    # --- pods ---

    def _send(self, turn: SessionTurn, pod_id: PodId, pull: Pull | None) -> None:
        self._uses[pod_id] += 1
        if pull is not None and self._pull(turn, pod_id, pull):
            return
        self._submit(turn, pod_id, 0)

    def _pull(self, turn: SessionTurn, pod_id: PodId, pull: Pull) -> bool:
        """Fetch the KV that the holder still has. False if it has no more than the receiver."""
        arrived = min(pull.cached_tokens, self._pods[pull.holder].held_tokens(turn.request))
        tokens = arrived - self._pods[pod_id].held_tokens(turn.request)
        if tokens <= 0 or self._link is None:
            return False
        turn.outcome.pulled_tokens = tokens
        kv_bytes = tokens * self._fleet[pod_id].known.kv_bytes_per_token
        self._transfer(turn, pull.holder, pod_id, kv_bytes, arrived)
        return True

    def _transfer(
        self, turn: SessionTurn, sender: PodId, receiver: PodId, kv_bytes: float, arrived_tokens: int
    ) -> None:
        """Move KV between pods, then submit the request to the receiver."""
        assert self._link is not None
        turn.ledger.pull_began(sender)

        def on_arrival() -> None:
            turn.ledger.pull_ended(sender)
            self._submit(turn, receiver, arrived_tokens)

        places = (("send", sender), ("receive", receiver))
        self._transfers.start(on_arrival, places, kv_bytes, self._link.t0_ms, self._clock.now_ms)

    def _submit(self, turn: SessionTurn, pod_id: PodId, arrived_tokens: int) -> None:
        request = turn.request
        if self._awaits_handoff(turn, pod_id):
            request = TrafficRequest(request.prompt_tokens, 1, request.blocks, request.prompt_blocks)
        try:
            self._pods[pod_id].submit(Job(turn, request, arrived_tokens), self._clock.now_ms)
        except ValueError:
            self._release(turn)
            self._refuse(turn, "does not fit")
            return
        self._schedule_wake(pod_id)

    def _schedule_wake(self, pod_id: PodId) -> None:
        """Start an idle pod, and schedule the end of its next steps."""
        pod = self._pods[pod_id]
        if pod.wake_ms == math.inf:
            self._apply(pod_id, pod.advance(self._clock.now_ms))
        self._versions[pod_id] += 1
        if pod.wake_ms < math.inf:
            self._clock.call_at(pod.wake_ms, self._wake, pod_id, self._versions[pod_id])

    def _wake(self, pod_id: PodId, version: int) -> None:
        if version == self._versions[pod_id]:
            self._apply(pod_id, self._pods[pod_id].advance(self._clock.now_ms))
            self._schedule_wake(pod_id)

    def _apply(self, pod_id: PodId, progress: Progress) -> None:
        for tier, held, blocks in progress.block_changes:
            self._updates.publish(pod_id, tier, held, blocks)
        for job, tokens in progress.loading:
            kv_bytes = tokens * self._fleet[pod_id].known.kv_bytes_per_token
            on_arrival = partial(self._on_load, pod_id, job)
            self._transfers.start(on_arrival, (("pcie", pod_id),), kv_bytes, 0.0, self._clock.now_ms)
        for job in progress.started:
            self._on_first_token(job, pod_id)
        for view in self.views:
            view.ledger.stepped(pod_id, self._clock.now_s)
        for job in progress.finished:
            self._on_finish(job, pod_id)

    def _on_load(self, pod_id: PodId, job: Job) -> None:
        self._pods[pod_id].finish_load(job, self._clock.now_ms)
        self._schedule_wake(pod_id)

    def _on_first_token(self, job: Job, pod_id: PodId) -> None:
        turn: SessionTurn = job.tag
        assert turn.prefill is not None
        turn.ledger.first_token(turn.prefill, self._clock.now_s)
        if pod_id == turn.prefill.pod:
            turn.outcome.cached_tokens = job.cached_tokens or 0
        turn.outcome.ttft_ms = self._clock.now_ms - turn.outcome.arrived_ms + self._conditions.overhead_ms

    def _on_finish(self, job: Job, pod_id: PodId) -> None:
        turn: SessionTurn = job.tag
        if self._awaits_handoff(turn, pod_id):
            self._hand_off(turn)
            return
        turn.outcome.e2e_ms = self._clock.now_ms - turn.outcome.arrived_ms + self._conditions.overhead_ms
        turn.outcome.worst_gap_ms = job.worst_gap_ms
        turn.answered(turn)
        self._release(turn)
        turn.view.answered(turn.request.output_tokens)
        self._end(turn)

    def _awaits_handoff(self, turn: SessionTurn, pod_id: PodId) -> bool:
        """Whether another pod decodes the answer after that pod's prefill."""
        return turn.decode is not None and turn.decode.pod != pod_id

    def _hand_off(self, turn: SessionTurn) -> None:
        """Move the KV of the computed prompt to the decode pod."""
        first, second = turn.prefill, turn.decode
        assert first is not None and second is not None
        turn.ledger.release(first, self._clock.now_s)
        self._uses[second.pod] += 1
        missing = turn.request.prompt_tokens - self._pods[second.pod].held_tokens(turn.request)
        kv_bytes = missing * self._fleet[first.pod].known.kv_bytes_per_token / self._conditions.handoff_layers
        self._transfer(turn, first.pod, second.pod, kv_bytes, turn.request.prompt_tokens - 1)

    def _release(self, turn: SessionTurn) -> None:
        for lease in (turn.prefill, turn.decode):
            if lease is not None:
                turn.ledger.release(lease, self._clock.now_s)

    def _end(self, turn: SessionTurn) -> None:
        self._running -= 1
        self._on_progress(len(self._outcomes) - self._running)
        session, number = turn.session, turn.number + 1
        if turn.outcome.refused:
            self._unsent += len(session.requests) - number
        elif number < len(session.requests):
            answered_ms = self._clock.now_ms + self._conditions.overhead_ms
            self._schedule_turn(answered_ms + session.requests[number].think_s * 1000, session, number)

    def _goes_on(self) -> bool:
        """Whether a request is served, or will arrive."""
        return bool(self._running or self._scheduled)

    def _record_backlogs(self, every_ms: float) -> None:
        self._backlogs_ms.append([pod.backlog_ms() for pod in self._pods.values()])
        if self._goes_on():
            self._clock.call_in(every_ms, self._record_backlogs, every_ms)


def _check(fleet: SimulatedFleet, policy: Policy, conditions: Conditions) -> None:
    if fleet.splits and fleet.link is None:
        raise ConfigError("prefill pods need a `link` to hand KV over to decode pods")
    if fleet.splits and not policy.splits:
        raise ConfigError(f"policy {policy.name} has no cost term `handoff`: it would not use the prefill pods")
    if any(replica >= conditions.routers for replica, _, _ in conditions.restarts):
        raise ConfigError(f"conditions.restarts: routers are numbered 0 to {conditions.routers - 1}")
