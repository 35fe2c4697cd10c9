"""What happens to one request, from the door to the last byte?

    admit -> fingerprint -> match -> decide -> attempt -> relay -> settle

The story is told here once, top to bottom; each phase is one method with its name. Only values and exceptions go back
up. This file never parses a body and never writes an error response: `api` does both.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.engines.catalog import ENGINES
from router.errors import RouterError, UpstreamBroken, UpstreamError
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.index.shared import SharedPrefixes
from router.observe.metrics import Metrics
from router.observe.phase import Phases
from router.observe.receipts import Receipt, ReceiptLog, receipt_blocks
from router.policy.decide import BYTES_PER_TOKEN, decide
from router.policy.spec import Policy
from router.proxy.answer import AnswerReader
from router.proxy.downstream import Downstream, Inbound
from router.proxy.headers import HeaderList, request_message, upstream_headers
from router.proxy.prompts import PromptReader
from router.proxy.relay import relay
from router.proxy.upstream import Reply, UpstreamPool
from router.stores.store import PrefixStore
from router.types import (
    Candidate,
    InferenceRequest,
    Lease,
    Pod,
    PodState,
    PrefixMatch,
    PromptPrefix,
    RouteDecision,
    Scene,
)

RETRY_STATUSES = frozenset({502, 503, 504})
"""Answers with which a pod says that another one should try."""

UNARY_PREFILL_SLACK = 1.5
"""An unstreamed answer does not show its first token; its prefill counts as done after this times its price."""


HEAVY_SHARE = 1.5
"""A prefix that carries more than this times one pod's fair share of the traffic must live on several pods."""


@dataclass(slots=True)
class Story:
    """What is remembered of one request while it is served; settled into metrics at its end."""

    inbound: Inbound
    phases: Phases = field(default_factory=Phases)
    prompt: PromptPrefix | None = None
    decision: RouteDecision | None = None
    candidate: Candidate | None = None
    reader: AnswerReader = field(default_factory=AnswerReader)
    status: int = 0
    first_token_s: float | None = None
    result: str = "error"

    @property
    def request(self) -> InferenceRequest:
        return self.inbound.request


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarding:
    """How requests are forwarded: the part of the configuration that this file reads."""

    retries: int
    route_headers: bool
    trust_engine_fields: bool
    predicted_ttl_s: float
    silent_ttl_s: float
    silent_capacity_tokens: int


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
        policy: Callable[[], Policy],
        pool: Callable[[Pod], UpstreamPool],
        publishes_events: Callable[[str], bool],
        metrics: Metrics,
        forwarding: Forwarding,
        receipts: ReceiptLog | None = None,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._breaker = breaker
        self._store = store
        self._readers = readers
        self._policy = policy
        self._pool = pool
        self._publishes_events = publishes_events
        self._metrics = metrics
        self._forwarding = forwarding
        self._receipts = receipts
        self._shared: dict[str, SharedPrefixes] = {}
        self._turns: Counter[str] = Counter()

    async def forward(self, story: Story, client: Downstream) -> None:
        """Serve one request. Raises `RouterError` where no answer could be given, or could not be finished."""
        self._metrics.in_flight.inc()
        try:
            story.prompt = await self.fingerprint(story)
            match = await self.match(story)
            story.decision = self.decide(story, match)
            await self.attempt_in_order(story, client)
            story.result = "ok" if story.status < 400 else "pod_error"
        except asyncio.CancelledError:
            story.result = "client_gone"
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
        scene = Scene(
            request=story.request,
            prompt=story.prompt,
            match=match,
            fleet=self._fleet.snapshot,
            inflight=self._ledger.inflight(),
            now_s=_now_s(),
            turn=self._turns[model],
            shared_blocks=self._shared_blocks(story),
        )
        return decide(scene, self._policy())

    def _shared_blocks(self, story: Story) -> int:
        if story.prompt is None:
            return 0
        model = story.request.model
        ready = sum(s.state is PodState.READY and s.pod.serves(model) for s in self._fleet.snapshot.pods)
        shared = self._shared.setdefault(model, SharedPrefixes())
        return shared.observe(story.prompt.hashes, threshold=HEAVY_SHARE / max(ready, 1))

    async def attempt_in_order(self, story: Story, client: Downstream) -> None:
        """Try candidates until one has begun to answer."""
        assert story.decision is not None
        candidates = story.decision.candidates[: 1 + self._forwarding.retries]
        for number, candidate in enumerate(candidates, start=1):
            last = number == len(candidates)
            try:
                await self.attempt(story, candidate, client, last=last)
                return
            except UpstreamError as error:
                self._metrics.sent.labels(candidate.pod.id, type(error).__name__).inc()
                self._breaker.failure(candidate.pod.id, _now_s())
                if last or client.started:
                    raise
                self._metrics.retries.labels(type(error).__name__).inc()

    async def attempt(self, story: Story, candidate: Candidate, client: Downstream, *, last: bool) -> None:
        """One candidate: book the lease before the first await, give it back whatever happens."""
        story.phases.enter("attempt")
        story.candidate = candidate
        pod = candidate.pod
        lease = self._ledger.book(pod, _prompt_tokens(story), candidate.cached_tokens)
        prefilled = self._first_token_timer(story, candidate, lease)
        try:
            self._predict(story, pod)
            reply = await self._pool(pod).exchange(self._message(story.inbound, pod))
            try:
                if reply.status in RETRY_STATUSES and not last:
                    raise UpstreamBroken(f"pod {pod.id} answered {reply.status}", pod=pod.id)
                story.status = reply.status
                await self.relay(story, reply, client, lease)
            finally:
                reply.close()
            self._breaker.success(pod.id)
            self._metrics.sent.labels(pod.id, "ok").inc()
        finally:
            if prefilled is not None:
                prefilled.cancel()
            self._ledger.release(lease)

    async def relay(self, story: Story, reply: Reply, client: Downstream, lease: Lease) -> None:
        """The answer, byte for byte."""
        story.phases.enter("relay")

        def first_token() -> None:
            story.first_token_s = story.phases.elapsed_s()
            self._ledger.first_token(lease)

        await relay(reply, client, story.reader, self._route_headers(story), first_token)

    def settle(self, story: Story) -> None:
        """Count what happened; compare what was predicted with what the engine reported."""
        story.phases.enter("settle")
        metrics, model = self._metrics, story.request.model if story.decision else "unknown"
        metrics.in_flight.dec()
        metrics.requests.labels(story.request.endpoint.value, model, story.result).inc()
        metrics.duration_s.labels(model).observe(story.phases.elapsed_s())
        if story.request.stream and story.first_token_s is not None:
            metrics.ttft_s.labels(model).observe(story.first_token_s)
        if story.result == "ok" and story.candidate is not None and story.prompt is not None:
            metrics.observe_prediction(
                model, story.prompt.token_count, story.candidate.cached_tokens, story.reader.cached_tokens
            )
        story.phases.enter("")
        metrics.observe_phases(story.phases)
        if self._receipts is not None:
            self._receipts.write(_receipt(story))

    # --- parts of an attempt ---

    def _predict(self, story: Story, pod: Pod) -> None:
        """From now on this prompt counts as cached there, until the pod's own events say so, or time is up."""
        if story.prompt is None:
            return
        prompt, keep = story.prompt, self._forwarding
        if self._publishes_events(pod.id):
            self._store.record(pod.id, prompt, _now_s(), ttl_s=keep.predicted_ttl_s, capacity_blocks=None)
            return
        capacity = pod.capacity_blocks or keep.silent_capacity_tokens // prompt.block_size_tokens
        self._store.record(pod.id, prompt, _now_s(), ttl_s=keep.silent_ttl_s, capacity_blocks=capacity)

    def _first_token_timer(self, story: Story, candidate: Candidate, lease: Lease) -> asyncio.TimerHandle | None:
        """An unstreamed answer does not show its first token: its prefill counts as done when it should be."""
        if story.request.stream:
            return None
        expected_s = max(candidate.cost.total_ms, lease.prefill_ms) / 1000 * UNARY_PREFILL_SLACK
        return asyncio.get_running_loop().call_later(expected_s, self._ledger.first_token, lease)

    def _message(self, inbound: Inbound, pod: Pod) -> bytes:
        pool = self._pool(pod)
        headers = upstream_headers(inbound.headers, trusted=self._forwarding.trust_engine_fields)
        headers.append((b"x-request-id", inbound.request.id.encode("latin-1", "replace")))
        headers.append((b"x-forwarded-for", inbound.peer.encode()))
        headers += [(name.encode(), value.encode()) for name, value in ENGINES[pod.engine].extra_headers(pod).items()]
        return request_message(
            inbound.method, pool.path_prefix + inbound.target, pool.host_header, headers, inbound.request.body
        )

    def _route_headers(self, story: Story) -> HeaderList:
        headers = [(b"x-request-id", story.request.id.encode("latin-1", "replace"))]
        if self._forwarding.route_headers and story.candidate and story.decision:
            headers += [
                (b"x-warmroute-pod", story.candidate.pod.id.encode()),
                (b"x-warmroute-policy", story.decision.policy.encode()),
                (b"x-warmroute-cached-tokens", b"%d" % story.candidate.cached_tokens),
            ]
        return headers


def _prompt_tokens(story: Story) -> int:
    return story.prompt.token_count if story.prompt else len(story.request.body) // BYTES_PER_TOKEN


def _now_s() -> float:
    return time.monotonic()


def _receipt(story: Story) -> Receipt:
    candidate, prompt, reader = story.candidate, story.prompt, story.reader
    block_size_tokens, blocks = receipt_blocks(prompt) if prompt else (0, [])
    elapsed_s = story.phases.elapsed_s()
    return Receipt(
        at_s=time.time() - elapsed_s,
        model=story.request.model,
        endpoint=story.request.endpoint.value,
        result=story.result,
        pod=candidate.pod.id if candidate else "",
        policy=story.decision.policy if story.decision else "",
        prompt_tokens=prompt.token_count if prompt else reader.prompt_tokens or 0,
        output_tokens=reader.output_tokens,
        block_size_tokens=block_size_tokens,
        blocks=blocks,
        predicted_ms=candidate.cost.total_ms if candidate else None,
        predicted_cached_tokens=candidate.cached_tokens if candidate else None,
        cached_tokens=reader.cached_tokens,
        ttft_ms=story.first_token_s * 1000 if story.request.stream and story.first_token_s is not None else None,
        e2e_ms=elapsed_s * 1000,
    )
