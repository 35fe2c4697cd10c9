"""What happens to one request, from the door to the last byte?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The story is told here once, top to bottom; each phase is one method with its name. Only values and exceptions go back
up. This file never parses a body and never writes an error response: `api` does both.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from router.decision import Candidate, Plan, RouteDecision, Split
from router.errors import NoReadyPod, RouterError, UpstreamBroken, UpstreamError
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.observe.journal import Journal
from router.observe.learning import Learning
from router.observe.metrics import Metrics
from router.observe.receipts import Failure, Kept, keep
from router.policy.classes import Classes
from router.policy.decide import decide, expected_ttft_ms, prompt_token_count
from router.policy.policy_set import PolicySet
from router.policy.recording import record
from router.policy.retry import RETRY_STATUSES
from router.policy.spec import Policy
from router.proxy.booking import Booking
from router.proxy.downstream import Downstream
from router.proxy.due import Appointment, Due
from router.proxy.headers import HeaderList
from router.proxy.hedging import Hedges
from router.proxy.legs import Legs
from router.proxy.prompts import PromptReader
from router.proxy.pulls import Pulls
from router.proxy.relay import AnyReply, relay
from router.proxy.retries import Retries
from router.proxy.shares import Shares
from router.proxy.split import Facts, Splits
from router.proxy.story import Story, outcome_of, slice_of, timed
from router.proxy.upstream import UpstreamPool
from router.stores.store import PrefixStore
from router.types import InferenceRequest, Pod, PodId, PrefixMatch, PromptPrefix, Scene

_now_s = time.monotonic

UNARY_PREFILL_SLACK = 1.5
"""An unstreamed answer does not show its first token; its prefill counts as done after this times its price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarding:
    """How requests are forwarded: the part of the configuration that this file reads."""

    retries: int
    retry_budget: float
    route_headers: bool
    trust_engine_fields: bool
    predicted_ttl_s: float
    no_events_ttl_s: float
    no_events_capacity_tokens: int


class Forwarder:
    """Serves requests over the owners of the program's facts."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        ledger: Ledger,
        breaker: Breaker,
        store: PrefixStore,
        readers: Mapping[str, PromptReader],
        policies: Callable[[], PolicySet],
        classes: Classes,
        pool: Callable[[Pod], UpstreamPool],
        handoff_facts: Facts,
        publishes_events: Callable[[str], bool],
        metrics: Metrics,
        forwarding: Forwarding,
        learning: Learning,
        journal: Journal | None = None,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._breaker = breaker
        self._store = store
        self._readers = readers
        self._policies = policies
        self._classes = classes
        self._legs = Legs(pool, trust_engine_fields=forwarding.trust_engine_fields)
        self._splits = Splits(fleet, breaker, self._legs, handoff_facts, metrics, learning)
        self._retries = Retries(forwarding.retry_budget, metrics)
        self._pulls = Pulls(fleet, self._legs, handoff_facts)
        self._publishes_events = publishes_events
        self._metrics = metrics
        self._forwarding = forwarding
        self._learning = learning
        self._journal = Journal() if journal is None else journal
        self._shares = Shares(fleet)
        self._hedges = Hedges(self.attempt, self._next, self._blame, self._retries)
        self._turns: Counter[str] = Counter()
        self._due = Due()

    async def forward(self, story: Story, client: Downstream) -> None:
        """Serve one request. Raises `RouterError` where no answer could be given, or could not be finished."""
        self._metrics.in_flight.value += 1
        try:
            story.prompt = await self.fingerprint(story)
            match = await self.match(story)
            story.decision = self.decide(story, match)
            await self.attempt_in_order(story, client)
            story.result = "ok" if story.status < 400 else "pod_error"
        except asyncio.CancelledError:
            story.result = "client_gone" if client.disconnected else "stopped"
            raise
        except RouterError as error:
            story.result = type(error).__name__
            raise
        finally:
            self.settle(story)

    async def fingerprint(self, story: Story) -> PromptPrefix | None:
        """Tokens and block hashes of the prompt, or None where they cannot be known."""
        story.phases.enter("fingerprint")
        reader = self._readers.get(story.request.model)
        return await reader.read(story.request) if reader and story.request.prompt else None

    async def match(self, story: Story) -> PrefixMatch:
        """Who holds how much of it."""
        story.phases.enter("match")
        if story.prompt is None:
            return PrefixMatch()
        match = await self._store.match(story.prompt, _now_s())
        if match.degraded:
            self._metrics.degraded_matches.labels(story.request.model).inc()
        return match

    def decide(self, story: Story, match: PrefixMatch) -> RouteDecision:
        """Every way to serve it, best first."""
        story.phases.enter("decide")
        model = story.request.adapter or story.request.model
        self._turns[model] += 1
        shared_blocks = self._shares.shared_blocks(story.request.model, story.prompt)
        scene = self._scene(story.request, story.prompt, match, self._turns[model], shared_blocks)
        story.workload, story.policy = self._policy_for(scene, story.inbound.headers)
        decision = decide(scene, story.policy)
        story.kept = self._journal.decided(scene, decision, story.policy, story.workload)
        return decision

    async def preview(self, request: InferenceRequest, headers: HeaderList) -> Kept:
        """What would be decided now. Nothing is sent, booked, counted or learnt. Raises `RouterError`."""
        reader = self._readers.get(request.model)
        prompt = await reader.read(request) if reader and request.prompt else None
        match = await self._store.match(prompt, _now_s()) if prompt else PrefixMatch()
        shared_blocks = self._shares.shared_blocks(request.model, prompt, counted=False)
        turn = self._turns[request.adapter or request.model] + 1
        scene = self._scene(request, prompt, match, turn, shared_blocks)
        workload, policy = self._policy_for(scene, headers, counted=False)
        return keep(record(scene, workload), decide(scene, policy), policy, time.time())

    def _scene(
        self, request: InferenceRequest, prompt: PromptPrefix | None, match: PrefixMatch, turn: int, shared_blocks: int
    ) -> Scene:
        return Scene(
            request=request,
            prompt=prompt,
            match=match,
            fleet=self._fleet.snapshot,
            inflight=self._ledger.inflight(),
            steps=self._ledger.steps(),
            now_s=_now_s(),
            turn=turn,
            shared_blocks=shared_blocks,
        )

    def _policy_for(self, scene: Scene, headers: HeaderList, *, counted: bool = True) -> tuple[str, Policy]:
        """What kind of work it is, and who decides such requests."""
        tokens = prompt_token_count(scene)
        workload = self._classes.classify(scene, prompt_tokens=tokens, headers=headers, counted=counted)
        return workload, self._policies().for_request(scene.request, workload, tokens, headers)

    async def attempt_in_order(self, story: Story, client: Downstream) -> None:
        """Try candidates until one has begun to answer."""
        candidate = self._first(story)
        self._retries.asked()
        while True:
            story.tries += 1
            try:
                await self._attempt(story, candidate, client)
                return
            except UpstreamError as error:
                self._blame(story, candidate, error)
                following = None if client.started else self._next(story)
                if following is None or not self._retries.allowed(error, bytes_sent=client.started):
                    raise
                candidate = following

    def _attempt(self, story: Story, candidate: Candidate, client: Downstream) -> Awaitable[None]:
        """With another beside it, where the policy wants that."""
        after_ms = story.policy.hedge_after_ms if story.policy else None
        if after_ms is None:
            return self.attempt(story, candidate, client)
        return self._hedges.attempt(story, candidate, client, after_ms / 1000)

    async def attempt(self, story: Story, candidate: Candidate, client: Downstream) -> None:
        """One candidate: book its places before the first await, give them back whatever happens."""
        story.phases.enter("attempt")
        story.candidate = candidate
        booking = Booking(self._ledger, candidate, story.prompt_tokens, self._learning.clock)
        prefilled = None
        try:
            prefilled = self._first_token_due(story, candidate, booking)
            self._predict(story, candidate)
            reply = await self._open(story, candidate, booking)
            try:
                if reply.status in RETRY_STATUSES and self._next(story) is not None and self._retries.left():
                    raise UpstreamBroken(f"pod {reply.pod} answered {reply.status}", pod=reply.pod)
                story.status = reply.status
                await self.relay(story, candidate, reply, client, booking)
            finally:
                reply.close()
            self._judge(reply)
        finally:
            if prefilled is not None:
                prefilled.clear()
            booking.release()
            self._learn(story, candidate, booking)

    def relay(
        self, story: Story, candidate: Candidate, reply: AnyReply, client: Downstream, booking: Booking
    ) -> Awaitable[None]:
        """The answer, byte for byte."""
        story.phases.enter("relay")

        def first_token() -> None:
            story.first_token_s = story.phases.elapsed_s()
            booking.first_token()
            if story.request.stream and not story.prefill_pod:
                story.let_go()

        headers = self._route_headers(story, candidate)
        stepped = partial(self._ledger.stepped, candidate.plan.pod.id)
        return relay(reply, client, story.reader, headers, first_token, stepped)

    def settle(self, story: Story) -> None:
        """Count what happened; compare what was predicted with what the engine reported."""
        story.phases.enter("settle")
        metrics, model, chosen = self._metrics, story.request.model if story.decision else "unknown", story.candidate
        metrics.in_flight.value -= 1
        ended = outcome_of(story)
        metrics.observe_request(ended.endpoint, model, ended.result, ended.e2e_ms, ended.ttft_ms)
        if chosen is not None and story.prompt is not None:
            if ended.ttft_ms is not None and story.decision is not None:
                self._learning.settle(model, story.decision, chosen, ended.ttft_ms)
            if ended.result == "ok":
                metrics.observe_prediction(model, ended.prompt_tokens, chosen.cached_tokens, ended.cached_tokens)
        if first_token := timed(story):
            self._breaker.first_token(*first_token, _now_s())
        if story.policy is not None:
            metrics.slices.settle(slice_of(story, story.policy, ended))
        story.phases.end()
        metrics.phase_s.observe_row(ended.phases_s)
        self._journal.settled(ended, story.kept, story.decision, story.prompt)

    def _learn(self, story: Story, candidate: Candidate, booking: Booking) -> None:
        """What this attempt has shown of the speed of the pod that computed its prompt."""
        if booking.pulled_ms is not None:
            self._pulls.learn(self._learning, candidate, booking.pulled_ms, booking.sent_beside)
        seen = booking.observation
        if seen is None or story.prompt is None:
            return
        plan, now_s = candidate.plan, _now_s()
        pod = plan.prefill if isinstance(plan, Split) else plan.pod
        if self._learning.listens(pod, now_s):
            if (found := story.cached_tokens) is not None:
                seen = seen.corrected(candidate.cached_tokens, found)
            self._learning.prefilled(pod, seen, now_s)

    # --- which candidate ---

    def _first(self, story: Story) -> Candidate:
        """The first candidate that may serve this request. Raises why there is none."""
        assert story.decision is not None
        candidate = self._next(story)
        if candidate is None:
            obstacle = self._splits.obstacle(story, story.decision.candidates[0].plan)
            raise obstacle or NoReadyPod("No pod may serve this request.")
        return candidate

    def _next(self, story: Story) -> Candidate | None:
        """The best of those behind the last one that was tried, without the pods that have failed this request if that
        can be; None where it was the last."""
        assert story.decision is not None
        attempts = story.policy.attempts if story.policy else None
        if story.tries >= (attempts or 1 + self._forwarding.retries):
            return None
        rest: Sequence[Candidate] = story.decision.candidates
        if story.candidate is not None:
            rest = rest[rest.index(story.candidate) + 1 :]
        if failed := story.failed_pods:
            rest = sorted(rest, key=lambda candidate: _needs(candidate.plan, failed))
        for candidate in rest:
            if self._splits.obstacle(story, candidate.plan) is None:
                return candidate
        return None

    def _blame(self, story: Story, candidate: Candidate, error: UpstreamError) -> None:
        """A failure is held against the pod whose fault it is, if it is one's."""
        self._metrics.sent.labels(error.pod or candidate.pod.id, type(error).__name__).inc()
        story.failures = (*story.failures, Failure(error.pod, type(error).__name__, str(error)))
        if error.pod:
            self._breaker.failure(error.pod, _now_s())
            story.failed_pods = (*story.failed_pods, error.pod)

    def _judge(self, reply: AnyReply) -> None:
        """An answer was relayed: whoever has nothing but server errors to say is no better than who says nothing."""
        well = reply.status < 500
        self._metrics.sent.of[reply.pod, "ok" if well else "server_error"].value += 1
        if well:
            self._breaker.success(reply.pod)
        else:
            self._breaker.failure(reply.pod, _now_s())

    # --- parts of an attempt ---

    def _open(self, story: Story, candidate: Candidate, booking: Booking) -> Awaitable[AnyReply]:
        """The answer to the client, however many pods it takes. Raises `UpstreamError`."""
        plan = candidate.plan
        if isinstance(plan, Split):
            return self._splits.open(story, plan, booking, last=self._next(story) is None)
        if plan.pull is not None:
            return self._pulls.open(story, plan.pod, plan.pull.holder, last=self._next(story) is None)
        return self._legs.send(story.inbound, plan.pod, story.request.body)

    def _predict(self, story: Story, candidate: Candidate) -> None:
        """From now on this prompt counts as cached there, until the pods' own events say so, or time is up."""
        if story.prompt is None:
            return
        plan = candidate.plan
        self._record(plan.pod, story.prompt)
        if isinstance(plan, Split):
            self._record(plan.prefill, story.prompt)

    def _record(self, pod: Pod, prompt: PromptPrefix) -> None:
        keep = self._forwarding
        if self._publishes_events(pod.id):
            self._store.record(pod.id, prompt, _now_s(), ttl_s=keep.predicted_ttl_s, capacity_blocks=None)
            return
        capacity = pod.capacity_blocks or keep.no_events_capacity_tokens // prompt.block_size_tokens
        self._store.record(pod.id, prompt, _now_s(), ttl_s=keep.no_events_ttl_s, capacity_blocks=capacity)

    def _first_token_due(self, story: Story, candidate: Candidate, booking: Booking) -> Appointment | None:
        """An unstreamed answer does not show its first token: its prefill counts as done when it should be."""
        if story.request.stream:
            return None
        expected_s = max(expected_ttft_ms(candidate.cost), booking.prefill_ms) / 1000 * UNARY_PREFILL_SLACK
        return self._due.after(expected_s, booking.first_token_is_due)

    def _route_headers(self, story: Story, candidate: Candidate) -> HeaderList:
        request_id, plan = (b"x-request-id", story.request.id.encode("latin-1", "replace")), candidate.plan
        if not self._forwarding.route_headers or story.decision is None:
            return [request_id]
        headers = [
            request_id,
            (b"x-warmroute-pod", plan.pod.id.encode()),
            (b"x-warmroute-policy", story.decision.policy.encode()),
            (b"x-warmroute-cached-tokens", b"%d" % candidate.cached_tokens),
        ]
        if isinstance(plan, Split):
            headers.append((b"x-warmroute-prefill-pod", plan.prefill.id.encode()))
        return headers


def _needs(plan: Plan, pods: tuple[PodId, ...]) -> bool:
    return plan.pod.id in pods or (isinstance(plan, Split) and plan.prefill.id in pods)
