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
from random import Random
from typing import Any, ClassVar, TypeAlias

from loadtest.engine_model.block_cache import TierCache
from loadtest.simulator.admission_rules import Admission
from loadtest.simulator.layered_pod import hit_rule, new_pod
from loadtest.simulator.link_sharing import LinkSharing
from loadtest.simulator.outcome import PodUse, RequestOutcome, Run
from loadtest.simulator.router_view import STORE, RouterSettings, RouterView
from loadtest.simulator.scenario import Conditions, SimulatedFleet
from loadtest.simulator.session_turn import SessionTurn, new_context
from loadtest.simulator.traffic import IdealCache, Session, Traffic, TrafficRequest
from loadtest.simulator.view_updates import ViewUpdates
from loadtest.simulator.virtual_clock import VirtualClock
from loadtest.simulator.virtual_job import Job, Progress
from router.admission.fair_order import Waiting
from router.admission.tenant import OPEN_TENANT
from router.decision import Candidate, Pull, Split
from router.errors import ConfigError
from router.policy.decide import expected_ttft_ms
from router.policy.spec import Policy
from router.types import Generation, PodId, Tier

DEFAULT_ROUTERS = RouterSettings()
OnEnded: TypeAlias = Callable[[int], None]
"""Called with the number of requests that have ended."""


def ignore_progress(_: int) -> None:
    """The default callback."""


class World:
    """One fleet, one policy and some routers. `run` may be called once."""

    view_class: ClassVar[type[RouterView]] = RouterView

    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: Policy,
        conditions: Conditions,
        *,
        routers: RouterSettings = DEFAULT_ROUTERS,
        block_size_tokens: int,
        seed: int = 0,
        admission: Admission | None = None,
    ) -> None:
        _check(fleet, policy, conditions)
        admission = admission or Admission()
        self._generation = Generation(model=fleet.pods[0].known.models[0], block_size_tokens=block_size_tokens)
        # an engine reports its capacity, so a router knows it
        known = [replace(pod.known, capacity_tokens=pod.true.kv_tokens) for pod in fleet.pods]
        self._conditions = conditions
        self._link = fleet.link
        self._fleet = {pod.known.id: pod for pod in fleet.pods}
        self._speeds = {pod.true.speed for pod in fleet.pods}
        self._pods = {pod.known.id: new_pod(pod.true, block_size_tokens) for pod in fleet.pods}
        self._has_store = fleet.store is not None
        if fleet.store:
            store = TierCache(fleet.store.kv_tokens)
            for pod in self._pods.values():
                pod.share(store, gets_answers=fleet.store.answers)
        self._clock = clock = VirtualClock()
        self.views = list[RouterView]()
        routers = replace(routers, rule=hit_rule(fleet.pods[0].true, block_size_tokens))
        has_events = routers.knowledge.events
        self._updates = ViewUpdates(self.views, self._pods, conditions, clock, self._goes_on, has_events, Random(seed))
        queue, refresh = admission.queue_settings(conditions.routers), self._updates.refresh
        for _ in range(conditions.routers):
            view = self.view_class(known, fleet.believed_links, policy, routers, queue, clock, refresh)
            self.views.append(view)
        self._admission = admission
        self._next_router = cycle(self.views)
        self._waiting: dict[Waiting, SessionTurn] = {}
        self._transfers = LinkSharing(self._bandwidths())
        self._versions = dict.fromkeys(self._pods, 0)
        self._last_start_ms = 0.0
        self._unsent = 0
        self._running = 0
        self._scheduled = 0
        """Sessions and turns that will arrive."""
        self._uses = dict.fromkeys(self._pods, 0)
        self._outcomes: list[RequestOutcome] = []
        self._ideal = IdealCache(block_size_tokens)
        self._ideal_cached_tokens = 0
        self._sessions: Iterator[Session] = iter(())
        self._on_progress: OnEnded = ignore_progress

    def run(self, traffic: Traffic, on_progress: OnEnded = ignore_progress) -> Run:
        self._sessions, self._on_progress = iter(traffic.sessions), on_progress
        self._schedule_next_session()
        self._updates.start()
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
            self._last_start_ms,
            self._unsent,
        )

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
        self._running += 1
        request_id, tenant = str(len(self._outcomes)), self._admission.tenants.get(session.kind, OPEN_TENANT)
        context = new_context(request_id, repr(session.start_s), tenant, self._generation.model, self._clock.now_s)
        router = next(self._next_router)
        turn = SessionTurn(self, router, context, session, number, self._generation, outcome, self._waiting)
        self._begin(turn)

    def _begin(self, turn: SessionTurn) -> None:
        self._updates.refresh(turn.router)
        turn.resume()

    def attempt(self, turn: SessionTurn, candidate: Candidate) -> None:
        if turn.context.tries == 1:
            self._ideal_cached_tokens += self._ideal.serve(turn.request)
            turn.outcome.waited_ms = self._clock.now_ms - turn.outcome.arrived_ms
            every = self._conditions.regret_every
            if every and len(self._outcomes) % every == 0:
                turn.outcome.regret_ms = self._regret_ms(turn.request, candidate.pod.id)
        self._send_in(turn, candidate)

    def _send_in(self, turn: SessionTurn, candidate: Candidate) -> None:
        """Send a booked request when the router has handled it."""
        plan, outcome = candidate.plan, turn.outcome
        outcome.pod, outcome.predicted_ms = candidate.pod.id, expected_ttft_ms(candidate.cost)
        outcome.predicted_cached_tokens = candidate.cached_tokens
        pod = plan.prefill if isinstance(plan, Split) else plan.pod
        self._clock.call_in(self._conditions.route_ms, self._send, turn, pod.id, plan.pull)

    def _regret_ms(self, request: TrafficRequest, chosen: PodId) -> float:
        """Computed from the true cache and queue of each pod, without pulls."""
        expected: dict[PodId, float] = {}
        for pod_id, pod in self._pods.items():
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
        assert self._link is not None
        on_arrival = partial(self._submit, turn, receiver, arrived_tokens)
        places = (("send", sender), ("receive", receiver))
        self._transfers.start(on_arrival, places, kv_bytes, self._link.t0_ms, self._clock.now_ms)

    def _submit(self, turn: SessionTurn, pod_id: PodId, arrived_tokens: int) -> None:
        request = turn.request
        if turn.awaits_handoff(pod_id):
            request = TrafficRequest(request.prompt_tokens, 1, request.blocks, request.prompt_blocks)
        try:
            self._pods[pod_id].submit(Job(turn, request, arrived_tokens), self._clock.now_ms)
        except ValueError:
            turn.refused(pod_id)
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
        for change in progress.block_changes:
            self._updates.publish(STORE if change.tier is Tier.REMOTE else pod_id, change)
        for job, tokens in progress.loading:
            kv_bytes = tokens * self._fleet[pod_id].known.kv_bytes_per_token
            on_arrival = partial(self._on_load, pod_id, job)
            place = "receive" if self._has_store else "pcie"
            t0_ms = self._link.t0_ms if self._has_store and self._link else 0.0
            self._transfers.start(on_arrival, ((place, pod_id),), kv_bytes, t0_ms, self._clock.now_ms)
        for job in progress.started:
            self._on_first_token(job, pod_id)
        for job in progress.finished:
            self._on_finish(job, pod_id)

    def _on_load(self, pod_id: PodId, job: Job) -> None:
        self._pods[pod_id].finish_load(job, self._clock.now_ms)
        self._schedule_wake(pod_id)

    def _on_first_token(self, job: Job, pod_id: PodId) -> None:
        turn: SessionTurn = job.tag
        if pod_id == (turn.context.prefill_pod or turn.outcome.pod):
            cached_tokens = turn.outcome.cached_tokens = job.cached_tokens or 0
            speed = self._pods[pod_id].config.speed
            turn.outcome.prefill_ms = speed.compute_ms(cached_tokens, turn.request.prompt_tokens)
        if not turn.awaits_handoff(pod_id):
            self._after_overhead(self._stream, turn, pod_id)

    def _on_finish(self, job: Job, pod_id: PodId) -> None:
        turn: SessionTurn = job.tag
        if turn.awaits_handoff(pod_id):
            self._hand_off(turn, pod_id)
            return
        self._after_overhead(self._complete, turn, pod_id)

    def _after_overhead(self, callback: Callable[..., None], *args: Any) -> None:
        """Call when the router receives what a pod sends now."""
        if self._conditions.overhead_ms:
            self._clock.call_in(self._conditions.overhead_ms, callback, *args)
        else:
            callback(*args)

    def _stream(self, turn: SessionTurn, pod_id: PodId) -> None:
        turn.outcome.ttft_ms = self._clock.now_ms - turn.outcome.arrived_ms
        if pod_id == turn.context.prefill_pod:
            turn.computed(turn.outcome.cached_tokens)
        turn.first_token(pod_id)

    def _complete(self, turn: SessionTurn, pod_id: PodId) -> None:
        """The router receives the last token."""
        turn.outcome.e2e_ms = self._clock.now_ms - turn.outcome.arrived_ms
        turn.complete(pod_id, turn.outcome.cached_tokens)

    def _hand_off(self, turn: SessionTurn, prefill: PodId) -> None:
        turn.computed(turn.outcome.cached_tokens)
        decode = turn.outcome.pod
        self._uses[decode] += 1
        missing = turn.request.prompt_tokens - self._pods[decode].held_tokens(turn.request)
        kv_bytes = missing * self._fleet[prefill].known.kv_bytes_per_token
        self._transfer(turn, prefill, decode, kv_bytes, turn.request.prompt_tokens - 1)

    def ended(self, turn: SessionTurn, refused: str) -> None:
        if refused:
            turn.outcome.refused = refused
            turn.outcome.waited_ms = self._clock.now_ms - turn.outcome.arrived_ms
        self._running -= 1
        self._on_progress(len(self._outcomes) - self._running)
        session, number = turn.session, turn.number + 1
        if turn.outcome.refused:
            self._unsent += len(session.requests) - number
        elif number < len(session.requests):
            self._schedule_turn(self._clock.now_ms + session.requests[number].think_s * 1000, session, number)

    def _goes_on(self) -> bool:
        """Whether a request is served, or will arrive."""
        return bool(self._running or self._scheduled)


def _check(fleet: SimulatedFleet, policy: Policy, conditions: Conditions) -> None:
    if fleet.splits and fleet.link is None:
        raise ConfigError("prefill pods need a `link` to hand KV over to decode pods")
    if any(pod.true.kv_groups and pod.true.cpu_kv_tokens for pod in fleet.pods):
        raise ConfigError("`cpu_kv_tokens` is not simulated with `kv_groups`")
    if fleet.store and (fleet.link is None or conditions.restarts):
        raise ConfigError("a `store` needs a `link`, and is not simulated with `conditions.restarts`")
    if fleet.store and any(pod.true.kv_groups or pod.true.cpu_kv_tokens for pod in fleet.pods):
        raise ConfigError("a `store` is not simulated with `kv_groups` or `cpu_kv_tokens`")
    if fleet.splits and not policy.splits:
        raise ConfigError(f"policy {policy.name} has no cost term `handoff`: it would not use the prefill pods")
    if any(replica >= conditions.routers for replica, _, _ in conditions.restarts):
        raise ConfigError(f"conditions.restarts: routers are numbered 0 to {conditions.routers - 1}")
