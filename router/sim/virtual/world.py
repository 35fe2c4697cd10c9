"""What happens when this traffic meets this fleet under this policy?

One heap of events in virtual milliseconds: arrivals, steps of pods, transfers, scrapes. The truth is in the pods, what
routers believe in their views, and news travels late, or not at all. One seed, one run. This file reads no real clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle
from random import Random
from typing import Any, TypeAlias

from router.decision import Lease, Pull, RouteDecision, Split
from router.errors import ConfigError, RouterError
from router.fleet.ledger import Ledger
from router.policy.decide import expected_ttft_ms
from router.policy.spec import Policy
from router.sim.virtual.batch import Job, Progress
from router.sim.virtual.link_sharing import LinkSharing
from router.sim.virtual.outcome import PodUse, RequestOutcome, Run
from router.sim.virtual.router_view import Knowledge, RouterView
from router.sim.virtual.simulated_fleet import Conditions, SimulatedFleet, SimulatedPod
from router.sim.virtual.traffic import Session, Traffic, TrafficRequest
from router.sim.virtual.virtual_pod import VirtualPod, steps_under_way
from router.types import BlockHash, Generation, Pod, Tier

Progressed: TypeAlias = Callable[[int], None]  # told how many requests have ended so far


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request was sent, and what the router that sent it has to give back."""

    pod: str
    ledger: Ledger
    lease: Lease


@dataclass(slots=True)
class _Request:
    """One ask on its way. Without a place to `decode`, the one to `prefill` serves it whole."""

    session: Session
    turn: int
    outcome: RequestOutcome
    prefill: _Place | None = None
    decode: _Place | None = None

    @property
    def ask(self) -> TrafficRequest:
        return self.session.requests[self.turn]


class World:
    """One fleet, one policy, some routers. `run` may be called once."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: Policy,
        conditions: Conditions,
        *,
        knowledge: Knowledge | None = None,
        block_size_tokens: int,
        seed: int = 0,
    ) -> None:
        self._conditions = conditions
        self._random = Random(seed)
        knowledge = knowledge or Knowledge()
        pods = fleet.pods
        self._link = fleet.link
        generation = Generation(model=pods[0].known.models[0], block_size_tokens=block_size_tokens)
        self._facts = {pod.known.id: pod for pod in pods}
        self._pods = {pod.known.id: VirtualPod(pod.true, block_size_tokens) for pod in pods}
        self._block = block_size_tokens
        if fleet.splits and fleet.link is None:
            raise ConfigError("prefill pods need a link to hand KV over to decode pods")
        if fleet.splits and not policy.splits:
            raise ConfigError(f"policy {policy.name} prices no handoff: it would leave the prefill pods idle")
        if any(replica >= conditions.routers for replica, _, _ in conditions.restarts):
            raise ConfigError(f"restarts: there are only routers 0 to {conditions.routers - 1}")
        known, links = [_told(pod, block_size_tokens) for pod in pods], fleet.believed_links
        self._views = [RouterView(known, generation, policy, knowledge, links) for _ in range(conditions.routers)]
        self._next_view = cycle(range(conditions.routers))
        self._events_known = knowledge.events
        self._links = LinkSharing(self._bandwidths())
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = count()
        self._versions = dict.fromkeys(self._pods, 0)
        self._news: deque[tuple[float, str, Tier, bool, list[BlockHash]]] = deque()
        self._now_ms = 0.0
        self._open = 0
        self._coming = 0
        """Sessions and turns that are sure to arrive."""
        self._uses = dict.fromkeys(self._pods, 0)
        self._outcomes: list[RequestOutcome] = []
        self._ideal: set[BlockHash] = set()
        self._ideal_cached_tokens = 0
        self._more: Iterator[Session] = iter(())
        self._progressed: Progressed = lambda _: None

    def run(self, traffic: Traffic, progressed: Progressed = lambda _: None) -> Run:
        """Everything from the first arrival to the last token."""
        self._more, self._progressed = iter(traffic.sessions), progressed
        self._expect_next_session()
        self._at(0.0, self._scrape)
        if self._conditions.exchange_ms and len(self._views) > 1:
            self._at(self._conditions.exchange_ms, self._exchange)
        for replica, at_s, blind_s in self._conditions.restarts:
            self._at(at_s * 1000, self._restart, replica, blind_s)
        while self._heap or self._links.next_ms < math.inf:
            if self._links.next_ms <= (self._heap[0][0] if self._heap else math.inf):
                self._now_ms = self._links.next_ms
                for ended in self._links.advance(self._now_ms):
                    ended()
                continue
            self._now_ms, _, what, args = heapq.heappop(self._heap)
            what(*args)
        ended_ms = max((one.arrived_ms + one.e2e_ms for one in self._outcomes if not one.refused), default=0.0)
        return Run(self._outcomes, {pod: self._use(pod) for pod in self._pods}, ended_ms, self._ideal_cached_tokens)

    def _use(self, pod_id: str) -> PodUse:
        pod = self._pods[pod_id]
        return PodUse(self._uses[pod_id], pod.computed_tokens, pod.busy_ms, pod.preemptions)

    def _at(self, when_ms: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when_ms, next(self._ids), what, args))

    def _bandwidths(self) -> dict[Any, float]:
        places: dict[Any, float] = {("pcie", pod): facts.pcie_bytes_per_ms for pod, facts in self._facts.items()}
        if self._link:
            for pod in self._facts:
                places["send", pod] = places["receive", pod] = self._link.bytes_per_ms
        return places

    # --- arrivals ---

    def _expect_next_session(self) -> None:
        session = next(self._more, None)
        if session is not None:
            self._expect(session.start_s * 1000, session, 0)

    def _expect(self, when_ms: float, session: Session, turn: int) -> None:
        self._coming += 1
        self._at(when_ms, self._arrive, session, turn)

    def _arrive(self, session: Session, turn: int) -> None:
        self._coming -= 1
        if turn == 0:
            self._expect_next_session()
        ask = session.requests[turn]
        request = _Request(
            session, turn, RequestOutcome(session.kind, self._now_ms, ask.prompt_tokens, ask.output_tokens)
        )
        self._outcomes.append(request.outcome)
        self._open += 1
        view = self._views[next(self._next_view)]
        try:
            decision = self._decide(view, ask, session)
        except RouterError as error:
            self._refuse(request, type(error).__name__)
            return
        if expected_ttft_ms(decision.candidates[0].cost) > self._conditions.refuse_above_ms:
            self._refuse(request, "too long to wait")
            return
        self._count_ideal(ask)
        self._dispatch(request, view, decision)

    def _refuse(self, request: _Request, why: str) -> None:
        request.outcome.refused = why
        self._end(request)

    def _count_ideal(self, ask: TrafficRequest) -> None:
        blocks, known = ask.blocks, self._ideal
        found = next((at for at in range(ask.prompt_blocks) if blocks[at] not in known), ask.prompt_blocks)
        self._ideal_cached_tokens += min(found * self._block, ask.prompt_tokens - 1)
        full = (ask.prompt_tokens + ask.output_tokens - 1) // self._block
        known.update(blocks[: max(ask.prompt_blocks, full)])

    # --- deciding ---

    def _decide(self, view: RouterView, ask: TrafficRequest, session: Session) -> RouteDecision:
        self._tell_news()
        hashes = ask.blocks[: ask.prompt_blocks]
        name = str(len(self._outcomes))
        steps, said = steps_under_way(self._pods, view.ledger.steps(), self._now_ms), repr(session.start_s)
        return view.decide(name, ask.prompt_tokens, hashes, ask.output_tokens, self._now_ms / 1000, steps, said)

    def _book(
        self, view: RouterView, ask: TrafficRequest, pod: str, cached_tokens: int, *, prefills: bool = True
    ) -> _Place:
        hashes, now_s = ask.blocks[: ask.prompt_blocks], self._now_ms / 1000
        lease = view.record_send(pod, ask.prompt_tokens, cached_tokens, hashes, now_s, prefills=prefills)
        return _Place(pod, view.ledger, lease)

    def _dispatch(self, request: _Request, view: RouterView, decision: RouteDecision) -> None:
        best, outcome = decision.candidates[0], request.outcome
        outcome.pod, outcome.predicted_ms = best.pod.id, expected_ttft_ms(best.cost)
        outcome.predicted_cached_tokens = best.cached_tokens
        every = self._conditions.regret_every
        if every and len(self._outcomes) % every == 0:
            outcome.regret_ms = self._regret_ms(request.ask, best.pod.id)
        plan = best.plan
        first = plan.prefill if isinstance(plan, Split) else best.pod
        request.prefill = self._book(view, request.ask, first.id, best.cached_tokens)
        if isinstance(plan, Split) and request.ask.output_tokens > 1:
            request.decode = self._book(view, request.ask, plan.decode.id, 0, prefills=False)
        self._at(self._now_ms + self._conditions.route_ms, self._send, request, first.id, plan.pull)

    def _regret_ms(self, ask: TrafficRequest, chosen: str) -> float:
        """By what really lies and waits on each pod now, without pulls."""
        expected: dict[str, float] = {}
        for pod_id in self._views[0].pods:
            pod = self._pods[pod_id]
            prefill_ms = pod.config.speed.prefill_ms(ask.prompt_tokens, pod.held_tokens(ask))
            expected[pod_id] = pod.backlog_ms() + prefill_ms
        return expected[chosen] - min(expected.values())

    # --- on pods ---

    def _send(self, request: _Request, pod_id: str, pull: Pull | None) -> None:
        self._uses[pod_id] += 1
        if pull is not None and self._pull(request, pod_id, pull):
            return
        self._submit(request, pod_id, 0)

    def _pull(self, request: _Request, pod_id: str, pull: Pull) -> bool:
        """Begin to fetch what the holder still has; False where that is nothing."""
        held = self._pods[pull.holder].held_tokens(request.ask)
        tokens = min(pull.cached_tokens, held) - self._pods[pod_id].held_tokens(request.ask)
        if tokens <= 0 or self._link is None or request.prefill is None:
            return False
        request.outcome.pulled_tokens = tokens
        kv_bytes = tokens * self._facts[pod_id].known.kv_bytes_per_token
        arrived = min(pull.cached_tokens, held)
        self._transfer(request, request.prefill.ledger, pull.holder, pod_id, kv_bytes, arrived)
        return True

    def _transfer(
        self, request: _Request, ledger: Ledger, sender: str, receiver: str, kv_bytes: float, arrived_tokens: int
    ) -> None:
        """KV goes from pod to pod, and the request goes on where it arrives."""
        assert self._link is not None
        ledger.pull_began(sender)

        def arrive() -> None:
            ledger.pull_ended(sender)
            self._submit(request, receiver, arrived_tokens)

        places = (("send", sender), ("receive", receiver))
        self._links.start(arrive, places, kv_bytes, self._link.t0_ms, self._now_ms)

    def _submit(self, request: _Request, pod_id: str, arrived_tokens: int) -> None:
        ask = request.ask
        if self._goes_on(request, pod_id):
            ask = TrafficRequest(ask.prompt_tokens, 1, ask.blocks, ask.prompt_blocks)
        job = Job(request, ask, arrived_tokens)
        pod = self._pods[pod_id]
        try:
            pod.submit(job, self._now_ms)
        except ValueError:
            self._release(request)
            self._refuse(request, "does not fit")
            return
        self._touch(pod_id)

    def _touch(self, pod_id: str) -> None:
        """See to it that the pod is looked at when its next steps end."""
        pod = self._pods[pod_id]
        if pod.wake_ms == math.inf:
            self._take(pod_id, pod.advance(self._now_ms))
        self._versions[pod_id] += 1
        if pod.wake_ms < math.inf:
            self._at(pod.wake_ms, self._wake, pod_id, self._versions[pod_id])

    def _wake(self, pod_id: str, version: int) -> None:
        if version == self._versions[pod_id]:
            self._take(pod_id, self._pods[pod_id].advance(self._now_ms))
            self._touch(pod_id)

    def _take(self, pod_id: str, progress: Progress) -> None:
        for tier, held, blocks in progress.block_changes:
            self._announce(pod_id, tier, held, blocks)
        for job, tokens in progress.loading:
            kv_bytes = tokens * self._facts[pod_id].known.kv_bytes_per_token
            self._links.start(self._loaded(pod_id, job), (("pcie", pod_id),), kv_bytes, 0.0, self._now_ms)
        for job in progress.started:
            self._started(job, pod_id)
        for view in self._views:
            view.ledger.stepped(pod_id, self._now_ms / 1000)
        for job in progress.finished:
            self._finished(job, pod_id)

    def _loaded(self, pod_id: str, job: Job) -> Callable[[], None]:
        def done() -> None:
            self._pods[pod_id].finish_load(job, self._now_ms)
            self._touch(pod_id)

        return done

    def _started(self, job: Job, pod_id: str) -> None:
        request: _Request = job.tag
        place = request.prefill
        assert place is not None
        place.ledger.first_token(place.lease, self._now_ms / 1000)
        if pod_id == place.pod:
            request.outcome.cached_tokens = job.cached_tokens or 0
        request.outcome.ttft_ms = self._now_ms - request.outcome.arrived_ms + self._conditions.overhead_ms

    def _finished(self, job: Job, pod_id: str) -> None:
        request: _Request = job.tag
        if self._goes_on(request, pod_id):
            self._hand_off(request)
            return
        request.outcome.e2e_ms = self._now_ms - request.outcome.arrived_ms + self._conditions.overhead_ms
        request.outcome.worst_gap_ms = job.worst_gap_ms
        self._release(request)
        self._end(request)

    def _goes_on(self, request: _Request, pod_id: str) -> bool:
        """Whether the decode pod is still to take it over from that one."""
        return request.decode is not None and request.decode.pod != pod_id

    def _hand_off(self, request: _Request) -> None:
        """The prompt is computed: its KV goes to the decode pod."""
        first, second = request.prefill, request.decode
        assert first is not None and second is not None
        first.ledger.release(first.lease, self._now_ms / 1000)
        self._uses[second.pod] += 1
        missing = request.ask.prompt_tokens - self._pods[second.pod].held_tokens(request.ask)
        kv_bytes = missing * self._facts[first.pod].known.kv_bytes_per_token / self._conditions.handoff_layers
        self._transfer(request, first.ledger, first.pod, second.pod, kv_bytes, request.ask.prompt_tokens - 1)

    def _release(self, request: _Request) -> None:
        for place in (request.prefill, request.decode):
            if place is not None:
                place.ledger.release(place.lease, self._now_ms / 1000)

    def _end(self, request: _Request) -> None:
        self._open -= 1
        self._progressed(len(self._outcomes) - self._open)
        session, turn = request.session, request.turn + 1
        if turn < len(session.requests) and not request.outcome.refused:
            answered_ms = self._now_ms + self._conditions.overhead_ms
            self._expect(answered_ms + session.requests[turn].think_s * 1000, session, turn)

    # --- what routers hear ---

    def _announce(self, pod_id: str, tier: Tier, held: bool, blocks: list[BlockHash]) -> None:
        lost = self._conditions.event_loss > 0 and self._random.random() < self._conditions.event_loss
        if self._events_known and not lost:
            self._news.append((self._now_ms + self._conditions.event_delay_ms, pod_id, tier, held, blocks))

    def _tell_news(self) -> None:
        """Everything that has arrived by now."""
        news = self._news
        while news and news[0][0] <= self._now_ms:
            _, pod_id, tier, held, blocks = news.popleft()
            for view in self._views:
                view.apply_blocks(pod_id, tier, held, blocks)

    def _scrape(self) -> None:
        """What every pod says of itself now is what all routers believe until the next time."""
        loads = {pod_id: pod.load for pod_id, pod in self._pods.items()}
        for view in self._views:
            view.apply_loads(loads, self._now_ms / 1000)
        self._again(self._conditions.scrape_ms, self._scrape)

    def _exchange(self) -> None:
        own = [view.ledger.own() for view in self._views]
        for at, view in enumerate(self._views):
            view.apply_replicas(one for other, one in enumerate(own) if other != at)
        assert self._conditions.exchange_ms is not None
        self._again(self._conditions.exchange_ms, self._exchange)

    def _restart(self, replica: int, blind_s: float) -> None:
        self._views[replica].restart()
        if self._events_known:
            self._at(self._now_ms + blind_s * 1000, self._read_again, replica)

    def _read_again(self, replica: int) -> None:
        """The index is there, with all that pods hold now."""
        view = self._views[replica]
        for pod_id in view.pods:
            pod = self._pods[pod_id]
            view.apply_blocks(pod_id, Tier.GPU, True, list(pod.cache.blocks))
            if pod.cpu is not None:
                view.apply_blocks(pod_id, Tier.CPU, True, list(pod.cpu.blocks))

    def _again(self, after_ms: float, what: Callable[[], None]) -> None:
        """As long as anything else is still to happen."""
        if self._open or self._coming:
            self._at(self._now_ms + after_ms, what)


def _told(pod: SimulatedPod, block_size_tokens: int) -> Pod:
    """With its capacity, as engines tell it."""
    return replace(pod.known, capacity_blocks=pod.true.kv_tokens // block_size_tokens)
