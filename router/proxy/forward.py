"""What happens to one request, from the door to the last byte?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The context is told here once, top to bottom; each phase is one method with its name. Only values and exceptions go back
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
from router.observe.calibrator import Calibrator
from router.observe.journal import Journal
from router.observe.log import RequestLog
from router.observe.metrics import Metrics
from router.observe.receipts import Failure, RecordedDecision, record_decision
from router.policy.classes import Classes
from router.policy.decide import decide, expected_ttft_ms, prompt_token_count
from router.policy.policy_set import PolicySet
from router.policy.recording import record
from router.policy.retry import RETRY_STATUSES
from router.policy.spec import Policy
from router.proxy.booking import Booking
from router.proxy.downstream import Downstream
from router.proxy.headers import HeaderList
from router.proxy.prompt_readers import PromptReader
from router.proxy.pulls import PullExecutor
from router.proxy.relay import AnyReply, relay
from router.proxy.request_context import RequestContext, outcome_of, slice_of, timed
from router.proxy.retries import Retries
from router.proxy.shares import Shares
from router.proxy.split import Facts, SplitExecutor
from router.proxy.upstream import UpstreamPool, UpstreamSender
from router.stores.prefix_store import PrefixStore
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
        calibrator: Calibrator,
        journal: Journal | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._breaker = breaker
        self._store = store
        self._readers = readers
        self._policies = policies
        self._classes = classes
        self._sender = UpstreamSender(pool, trust_engine_fields=forwarding.trust_engine_fields)
        self._splits = SplitExecutor(fleet, breaker, self._sender, handoff_facts, metrics, calibrator)
        self._retries = Retries(forwarding.retry_budget, metrics)
        self._pulls = PullExecutor(fleet, self._sender, handoff_facts)
        self._publishes_events = publishes_events
        self._metrics = metrics
        self._forwarding = forwarding
        self._calibrator = calibrator
        self._journal = Journal() if journal is None else journal
        self._request_log = request_log
        self._shares = Shares(fleet)
        self._turns: Counter[str] = Counter()

    async def forward(self, context: RequestContext, client: Downstream) -> None:
        """Serve one request. Raises `RouterError` where no answer could be given, or could not be finished."""
        self._metrics.in_flight.value += 1
        try:
            context.prompt = await self.fingerprint(context)
            match = await self.match(context)
            context.decision = self.decide(context, match)
            await self.attempt_in_order(context, client)
            context.result = "ok" if context.status < 400 else "pod_error"
        except asyncio.CancelledError:
            context.result = "client_gone" if client.disconnected else "stopped"
            raise
        except RouterError as error:
            context.result = type(error).__name__
            raise
        finally:
            self.settle(context)

    async def fingerprint(self, context: RequestContext) -> PromptPrefix | None:
        """Tokens and block hashes of the prompt, or None where they cannot be known."""
        context.phases.enter("fingerprint")
        reader = self._readers.get(context.request.model)
        return await reader.read(context.request) if reader and context.request.prompt else None

    async def match(self, context: RequestContext) -> PrefixMatch:
        """Who holds how much of it."""
        context.phases.enter("match")
        if context.prompt is None:
            return PrefixMatch()
        match = await self._store.match(context.prompt, _now_s())
        if match.degraded:
            self._metrics.degraded_matches.labels(context.request.model).inc()
        return match

    def decide(self, context: RequestContext, match: PrefixMatch) -> RouteDecision:
        """Every way to serve it, best first."""
        context.phases.enter("decide")
        model = context.request.adapter or context.request.model
        self._turns[model] += 1
        shared_blocks = self._shares.shared_blocks(context.request.model, context.prompt)
        scene = self._scene(context.request, context.prompt, match, self._turns[model], shared_blocks)
        context.workload, context.policy = self._policy_for(scene, context.inbound.headers)
        decision = decide(scene, context.policy)
        context.kept = self._journal.decided(scene, decision, context.policy, context.workload)
        return decision

    async def preview(self, request: InferenceRequest, headers: HeaderList) -> RecordedDecision:
        """What would be decided now. Nothing is sent, booked, counted or learnt. Raises `RouterError`."""
        reader = self._readers.get(request.model)
        prompt = await reader.read(request) if reader and request.prompt else None
        match = await self._store.match(prompt, _now_s()) if prompt else PrefixMatch()
        shared_blocks = self._shares.shared_blocks(request.model, prompt, counted=False)
        turn = self._turns[request.adapter or request.model] + 1
        scene = self._scene(request, prompt, match, turn, shared_blocks)
        workload, policy = self._policy_for(scene, headers, counted=False)
        return record_decision(record(scene, workload), decide(scene, policy), policy, time.time())

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

    async def attempt_in_order(self, context: RequestContext, client: Downstream) -> None:
        """Try candidates until one has begun to answer."""
        candidate = self._first(context)
        self._retries.asked()
        while True:
            context.tries += 1
            try:
                await self.attempt(context, candidate, client)
                return
            except UpstreamError as error:
                self._record_failure(context, candidate, error)
                following = None if client.started else self._next(context)
                if following is None or not self._retries.allowed(error, bytes_sent=client.started):
                    raise
                candidate = following

    async def attempt(self, context: RequestContext, candidate: Candidate, client: Downstream) -> None:
        """One candidate: book its places before the first await, give them back whatever happens."""
        context.phases.enter("attempt")
        context.candidate = candidate
        booking = Booking(self._ledger, candidate, context.prompt_tokens, self._calibrator.clock)
        prefilled = None
        try:
            prefilled = self._first_token_due(context, candidate, booking)
            self._predict(context, candidate)
            reply = await self._open(context, candidate, booking)
            try:
                if reply.status in RETRY_STATUSES and self._next(context) is not None and self._retries.left():
                    raise UpstreamBroken(f"pod {reply.pod} answered {reply.status}", pod=reply.pod)
                context.status = reply.status
                await self.relay(context, candidate, reply, client, booking)
            finally:
                reply.close()
            self._record_result(reply)
        finally:
            if prefilled is not None:
                prefilled.cancel()
            booking.release()
            self._learn(context, candidate, booking)

    def relay(
        self, context: RequestContext, candidate: Candidate, reply: AnyReply, client: Downstream, booking: Booking
    ) -> Awaitable[None]:
        """The answer, byte for byte."""
        context.phases.enter("relay")

        def first_token() -> None:
            context.first_token_s = context.phases.elapsed_s()
            booking.first_token()
            if context.request.stream and not context.prefill_pod:
                context.let_go()

        headers = self._route_headers(context, candidate)
        stepped = partial(self._ledger.stepped, candidate.plan.pod.id)
        return relay(reply, client, context.reader, headers, first_token, stepped)

    def settle(self, context: RequestContext) -> None:
        """Count what happened; compare what was predicted with what the engine reported."""
        context.phases.enter("settle")
        metrics, model, chosen = (
            self._metrics,
            context.request.model if context.decision else "unknown",
            context.candidate,
        )
        metrics.in_flight.value -= 1
        ended = outcome_of(context)
        metrics.observe_request(ended.endpoint, model, ended.result, ended.e2e_ms, ended.ttft_ms)
        if chosen is not None and context.prompt is not None:
            if ended.ttft_ms is not None and context.decision is not None:
                self._calibrator.settle(model, context.decision, chosen, ended.ttft_ms)
            if ended.result == "ok":
                metrics.observe_prediction(model, ended.prompt_tokens, chosen.cached_tokens, ended.cached_tokens)
        if first_token := timed(context):
            self._breaker.first_token(*first_token, _now_s())
        if context.policy is not None:
            metrics.slices.settle(slice_of(context, context.policy, ended))
        context.phases.end()
        metrics.phase_s.observe_row(ended.phases_s)
        self._journal.settled(ended, context.kept, context.decision, context.prompt)
        if self._request_log is not None:
            self._request_log.log(
                id=ended.id,
                model=ended.model,
                pod=chosen.pod.id if chosen is not None else "",
                policy=context.decision.policy if context.decision is not None else "",
                status=context.status or None,
                result=ended.result,
                cached_tokens=ended.cached_tokens,
                ttft_ms=ended.ttft_ms,
                e2e_ms=ended.e2e_ms,
            )

    def _learn(self, context: RequestContext, candidate: Candidate, booking: Booking) -> None:
        """What this attempt has shown of the speed of the pod that computed its prompt."""
        if booking.pulled_ms is not None:
            self._pulls.learn(self._calibrator, candidate, booking.pulled_ms, booking.sent_beside)
        seen = booking.observation
        if seen is None or context.prompt is None:
            return
        plan, now_s = candidate.plan, _now_s()
        pod = plan.prefill if isinstance(plan, Split) else plan.pod
        if self._calibrator.wants_observation(pod, now_s):
            if (found := context.cached_tokens) is not None:
                seen = seen.corrected(candidate.cached_tokens, found)
            self._calibrator.observe_prefill(pod, seen, now_s)

    # --- which candidate ---

    def _first(self, context: RequestContext) -> Candidate:
        """The first candidate that may serve this request. Raises why there is none."""
        assert context.decision is not None
        candidate = self._next(context)
        if candidate is None:
            unusable_reason = self._splits.unusable_reason(context, context.decision.candidates[0].plan)
            raise unusable_reason or NoReadyPod("No pod may serve this request.")
        return candidate

    def _next(self, context: RequestContext) -> Candidate | None:
        """The best of those behind the last one that was tried, without the pods that have failed this request if that
        can be; None where it was the last."""
        assert context.decision is not None
        attempts = context.policy.attempts if context.policy else None
        if context.tries >= (attempts or 1 + self._forwarding.retries):
            return None
        rest: Sequence[Candidate] = context.decision.candidates
        if context.candidate is not None:
            rest = rest[rest.index(context.candidate) + 1 :]
        if failed := context.failed_pods:
            rest = sorted(rest, key=lambda candidate: _needs(candidate.plan, failed))
        for candidate in rest:
            if self._splits.unusable_reason(context, candidate.plan) is None:
                return candidate
        return None

    def _record_failure(self, context: RequestContext, candidate: Candidate, error: UpstreamError) -> None:
        """A failure is held against the pod whose fault it is, if it is one's."""
        self._metrics.sent.labels(error.pod or candidate.pod.id, type(error).__name__).inc()
        context.failures = (*context.failures, Failure(error.pod, type(error).__name__, str(error)))
        if error.pod:
            self._breaker.failure(error.pod, _now_s())
            context.failed_pods = (*context.failed_pods, error.pod)

    def _record_result(self, reply: AnyReply) -> None:
        """An answer was relayed: whoever has nothing but server errors to say is no better than who says nothing."""
        well = reply.status < 500
        self._metrics.sent.of[reply.pod, "ok" if well else "server_error"].value += 1
        if well:
            self._breaker.success(reply.pod)
        else:
            self._breaker.failure(reply.pod, _now_s())

    # --- parts of an attempt ---

    def _open(self, context: RequestContext, candidate: Candidate, booking: Booking) -> Awaitable[AnyReply]:
        """The answer to the client, however many pods it takes. Raises `UpstreamError`."""
        plan = candidate.plan
        if isinstance(plan, Split):
            return self._splits.open(context, plan, booking, last=self._next(context) is None)
        if plan.pull is not None:
            return self._pulls.open(context, plan.pod, plan.pull.holder, last=self._next(context) is None)
        return self._sender.send(context.inbound, plan.pod, context.request.body)

    def _predict(self, context: RequestContext, candidate: Candidate) -> None:
        """From now on this prompt counts as cached there, until the pods' own events say so, or time is up."""
        if context.prompt is None:
            return
        plan = candidate.plan
        self._record(plan.pod, context.prompt)
        if isinstance(plan, Split):
            self._record(plan.prefill, context.prompt)

    def _record(self, pod: Pod, prompt: PromptPrefix) -> None:
        keep = self._forwarding
        if self._publishes_events(pod.id):
            self._store.record(pod.id, prompt, _now_s(), ttl_s=keep.predicted_ttl_s, capacity_blocks=None)
            return
        capacity = pod.capacity_blocks or keep.no_events_capacity_tokens // prompt.block_size_tokens
        self._store.record(pod.id, prompt, _now_s(), ttl_s=keep.no_events_ttl_s, capacity_blocks=capacity)

    def _first_token_due(
        self, context: RequestContext, candidate: Candidate, booking: Booking
    ) -> asyncio.TimerHandle | None:
        """An unstreamed answer does not show its first token: its prefill counts as done when it should be."""
        if context.request.stream:
            return None
        expected_s = max(expected_ttft_ms(candidate.cost), booking.prefill_ms) / 1000 * UNARY_PREFILL_SLACK
        return asyncio.get_running_loop().call_later(expected_s, booking.first_token_is_due)

    def _route_headers(self, context: RequestContext, candidate: Candidate) -> HeaderList:
        request_id, plan = (b"x-request-id", context.request.id.encode("latin-1", "replace")), candidate.plan
        if not self._forwarding.route_headers or context.decision is None:
            return [request_id]
        headers = [
            request_id,
            (b"x-warmroute-pod", plan.pod.id.encode()),
            (b"x-warmroute-policy", context.decision.policy.encode()),
            (b"x-warmroute-cached-tokens", b"%d" % candidate.cached_tokens),
        ]
        if isinstance(plan, Split):
            headers.append((b"x-warmroute-prefill-pod", plan.prefill.id.encode()))
        return headers


def _needs(plan: Plan, pods: tuple[PodId, ...]) -> bool:
    return plan.pod.id in pods or (isinstance(plan, Split) and plan.prefill.id in pods)
