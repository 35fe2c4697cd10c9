"""The life of a request: `Core.serve` reads from top to bottom.

    admit -> fingerprint -> match -> decide (and wait) -> attempt -> relay -> settle

A front reads bytes into a `RequestContext` (`reading.py`) and awaits `serve`. Every wait is a method of its `Effects`,
so nothing here has a socket, loop or clock: the HTTP front, the picker, the simulator and a front in memory drive the
same (`tests/kit/memory_front.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from router.admission.tenant import Tenant
from router.apis.chat_rules import concerned_by
from router.decision import Candidate, RouteDecision
from router.engines.engine_catalog import ENGINES, accepts_salt
from router.errors import RouterError, UpstreamError
from router.observe.counters import Counters
from router.observe.ended import EndingSink, RecordedDecision
from router.phases import Phases
from router.prompt.pictures.uuids import SEARCHED_BYTES, may_have_uuid
from router.request.attempt_rules import AttemptRules
from router.request.context import RequestContext
from router.request.continuation.kept_stream import KeptStream
from router.request.continuation.terms import REPEATED, WITH_IDS
from router.request.decisions import DecisionRecorder, RequestDecisions, Routing
from router.request.effects import Downstream, Effects
from router.request.endings import Endings
from router.request.fallbacks import CANNOT_SERVE, fallbacks_of, may_fall_back, may_wait, with_reasons
from router.request.fleet_state import Clock, FleetState
from router.request.hosted import HostedModel, NotAsked, money_taken, request_for
from router.request.inbound import Head, HeaderList
from router.request.queues import QueueSettings, RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.reading import for_model
from router.request.response_reader import TokenCountingReader
from router.request.tracker import Tracker
from router.types import Endpoint, FleetSnapshot, InferenceRequest, Pod, PodState, PromptPrefix

CONTINUED = WITH_IDS | REPEATED
"""Endpoints whose streams another pod may continue."""


@dataclass(frozen=True, slots=True)
class Observers:
    """What records requests: `recorder` their decisions, `counters` what happens meanwhile, `sinks` how they ended."""

    recorder: DecisionRecorder
    counters: Counters
    sinks: Sequence[EndingSink] = ()


COMPARED_EVERY = 10_000
"""Prompts per prompt whose tokens are compared with the count of its pod, if it is a chat that was read."""


class Core:
    """What serves requests, for any front. `queue`: None where requests wait in the engines. `charges`: None where no
    tenant has quotas. `records_usage`: sinks receive what each request used, so the tokens of streams are counted as
    they pass: their end, with the engine's count, may never come. `trusts_uuids`: pods receive the `uuid` that a client
    gives a picture."""

    def __init__(
        self,
        state: FleetState,
        rules: AttemptRules,
        routing: Routing,
        observers: Observers,
        clock: Clock,
        *,
        queue: QueueSettings | None = None,
        charges: QuotaCharges | None = None,
        records_usage: bool = False,
        trusts_uuids: bool = False,
    ) -> None:
        self.state, self.rules, self.clock, self.charges = state, rules, clock, charges
        self.counters = counters = observers.counters
        self._read_prompts = 0
        self.decisions = RequestDecisions(state, routing, observers.recorder, counters, clock)
        self.queues = RequestQueues(queue, state, self.decisions, counters, clock) if queue is not None else None
        self.endings = Endings(state, counters, observers.sinks, clock, charges, self.queues, records_usage)
        self._counts_tokens = records_usage
        self._trusts_uuids = trusts_uuids

    async def serve(self, context: RequestContext, client: Downstream, do: Effects) -> None:
        """Serve one request, and settle it however it ends. Raises `RouterError` where no response could be sent, or
        not to its end."""
        self.counters.requests_began(1)
        try:
            while True:  # again for each fallback; inline, so that other requests do not pay for it
                try:
                    if self.charges is not None and context.tenant.quotas:  # admit
                        await self.charges.begin(context, do)
                    if context.request.stream and (
                        self._counts_tokens or (context.hold and context.hold.applied.output)
                    ):
                        context.reader = TokenCountingReader(context.reader.format)
                    await self._read(context, do, context.tenant.name)  # fingerprint
                    if (
                        context.request.endpoint.api.is_about_tokens
                        and (answer := self._token_answer(context)) is not None
                    ):
                        await do.answer(answer, context.request.id, client)
                        return
                    if not self._trusts_uuids and _may_have_uuids(context):
                        body = await do.without_uuids(context.request.body, context.tenant)
                        context.request = replace(context.request, body=body)
                    self.decisions.decide(context, self.clock.now_s())  # match, decide
                    if self.charges is not None and context.hold is not None:
                        await self.charges.charge(context, self._charged_output(context), do)
                    if self.queues is not None and context.needs_place:
                        await self.queues.wait_for_place(context, do)
                    await self.attempts(self.tracker(context), client, do)
                    return
                except RouterError as error:
                    if client.started or not (context.request.fallbacks or context.held_until_s):
                        raise
                    again = await self._fallback(context, error, client, do)
                    if again is None:
                        return
                    context.begin_again(again)
        except RouterError as error:
            self.endings.failed(context, error, has_answered=client.started)
            raise
        except Exception:
            raise
        except BaseException:  # cancelled by its front
            self._cancelled(context, client, do)
            raise
        finally:
            self.endings.end(context, was_slow=client.was_slow)

    async def _fallback(
        self, context: RequestContext, error: RouterError, client: Downstream, do: Effects
    ) -> InferenceRequest | None:
        """The request by the first fallback that can serve it: another model, else its next pod; None if a provider has
        served it. Raises the error, or that of the last provider, where there is none."""
        request, fleet, not_asked = context.request, self.state.fleet, list[NotAsked]()
        if not may_fall_back(context, error):
            raise error
        why = request.fallback or error.code
        found = fallbacks_of(context, fleet, self.rules.hosted, context.pods_failed, self.clock.now_s())
        for number, one in found:
            left = request.fallbacks[number:]
            if isinstance(one, NotAsked):
                not_asked.append(one)
            elif isinstance(one, HostedModel):
                try:
                    asked = partial(request_for, one.provider, request, left, why)
                    if (refusal := await self._serve_hosted(context, one, asked, client, do)) is None:
                        return None
                    not_asked.append(refusal)
                except UpstreamError as failed:
                    if client.started:
                        raise
                    error = failed.with_traceback(None)
            else:
                if self.charges is not None:
                    self.charges.withdraw(context)
                salts = accepts_salt(fleet.snapshot, one[1] or one[0], request.endpoint)
                return await do.in_thread(partial(for_model, request, one, left, why, salts=salts))
        if may_wait(context, error):
            return await self._for_next_pod(context, request, do)
        for refusal in not_asked:
            self.counters.provider_refused(refusal.provider, refusal.code)
        raise with_reasons(error, not_asked)

    async def _for_next_pod(self, context: RequestContext, request: InferenceRequest, do: Effects) -> InferenceRequest:
        """The same request, once a pod may serve it. Its times and failures begin then."""
        if self.charges is not None:
            self.charges.withdraw(context)
        await do.pod_again(request, context.owner, context.tenant, context.held_until_s)
        context.phases.restart(self.clock.now_s())
        context.failures = ()
        return request

    async def _serve_hosted(
        self,
        context: RequestContext,
        one: HostedModel,
        asked: Callable[[], InferenceRequest],
        client: Downstream,
        do: Effects,
    ) -> NotAsked | None:
        """Have a provider serve the request that `asked` makes, or return which budget does not allow it. Raises
        `RouterError`."""
        charges, tokens = self.charges, context.prompt_tokens
        assert charges is not None
        spending = await charges.spend(context, one.provider, do)
        if isinstance(spending, NotAsked):
            return spending
        charges.withdraw(context)
        try:
            context.begin_again(await do.in_thread(asked))
            context.recorded, context.unread_tokens = None, tokens
            context.reader = TokenCountingReader(context.reader.format)
            if context.tenant.quotas:
                await charges.begin(context, do)
            output_tokens = self.state.output_lengths.charged_tokens(context.request, context.tenant.name)
            context.decision = RouteDecision("provider", "", (one.candidate(context, output_tokens),), "fallback")
            if context.hold is not None:
                await charges.charge(context, output_tokens, do)
            await self.attempts(Tracker(context, self.state, self.rules, self.counters), client, do)
        except BaseException as error:
            charges.spent(spending, self._cost(one, context, error))
            raise
        charges.spent(spending, self._cost(one, context, None))
        return None

    def _cost(self, one: HostedModel, context: RequestContext, error: BaseException | None) -> float | None:
        """The money that an attempt has cost, which ended with this error; None if that is unknown. Learns from it."""
        now_s = self.clock.now_s()
        one.learn(context, error, now_s)
        return money_taken(one.provider, context, self.endings.used(context, now_s), error)

    async def attempts(self, tracker: Tracker, client: Downstream, do: Effects) -> None:
        """Try candidates until one has responded. Each is booked before the first await, and released in any case.
        Raises the error of the last one."""
        now_s = self.clock.now_s
        try:
            candidate: Candidate | None = tracker.first(now_s())
            while candidate is not None:
                self.begin(tracker, candidate, do)
                try:
                    await do.attempt(tracker, candidate, client)
                    return
                except UpstreamError as error:
                    tracker.release(now_s())
                    if tracker.stream is not None:
                        await tracker.stream.plan(do)
                    candidate = tracker.failed(error, now_s())
                    if candidate is None and not tracker.last_events:
                        raise
                except Exception:
                    raise
                except BaseException:
                    tracker.left(now_s())
                    raise
                finally:
                    tracker.release(now_s())
            client.put(tracker.last_events)
            client.finish()
        finally:
            tracker.end(now_s())

    def begin(self, tracker: Tracker, candidate: Candidate, do: Effects) -> None:
        """Book a candidate. A first token that does not show is assumed to exist when it is expected to."""
        if (delay_s := tracker.begin(candidate, self.clock.now_s())) is not None:
            do.later(delay_s, tracker.assumption)

    def tracker(self, context: RequestContext) -> Tracker:
        options, request, again = self.rules.continuation, context.request, self.decisions.decide_again
        is_streamed = request.stream and request.endpoint in CONTINUED and not self.rules.hands_over
        tracker = Tracker(context, self.state, self.rules, self.counters)
        if is_streamed and options is not None and options.may_continue(context.decision):
            tracker.stream = KeptStream(context, self.state, self.rules, self.counters, again)
        return tracker

    async def preview(
        self, do: Effects, tenant_of: Callable[[str], Tenant], request: InferenceRequest, headers: HeaderList
    ) -> RecordedDecision:
        """The decision that would be made now. Nothing is sent, booked or counted. Raises `RouterError`."""
        head = Head(id=request.id, method="POST", target=b"", headers=headers)
        context = RequestContext(request, head, Phases(self.clock.now_s()), tenant_of(request.tenant))
        await self._read(context, do, None)
        found = fallbacks_of(context, self.state.fleet, self.rules.hosted, 0, self.clock.now_s())
        can_serve = [(number, one) for number, one in found if not isinstance(one, NotAsked)]
        try:
            kept = self.decisions.preview(context)
        except CANNOT_SERVE as error:
            for number, _ in can_serve[:1]:
                error.args = (f"{error} Its fallback `{request.fallbacks[number - 1]}` would serve it.",)
            raise
        output_tokens = self.state.output_lengths.charged_tokens(request, request.tenant)
        providers = (one for _, one in can_serve if isinstance(one, HostedModel))
        kept.providers = tuple(one.candidate(context, output_tokens) for one in providers)
        return kept

    async def _read(self, context: RequestContext, do: Effects, owner: str | None) -> None:
        """Find the stored response that a request of `owner` continues, and read its prompt."""
        request = context.request
        if not context.stored_pod and (previous := request.prompt.get("previous_response_id")):
            context.stored_pod = (await do.located(previous, "previous_response_id", owner)).pod
        context.phases.enter("fingerprint", self.clock.now_s())
        if request.prompt:
            found = await do.tokens(request)
            context.prompt, context.unread = (found, "") if isinstance(found, PromptPrefix) else (None, found or "")
            self._read_prompts += 1
            if self._read_prompts % COMPARED_EVERY == 0:
                context.compared = _compared_rules(context)

    def _token_answer(self, context: RequestContext) -> Iterator[bytes] | None:
        """The router's own answer to a request about tokens, which needs no prompt on a pod."""
        answer, context.prompt = token_answer(context.request, context.prompt, self.state.fleet.snapshot), None
        if answer is not None:
            context.phases.enter("relay", self.clock.now_s())
            context.status, context.result = 200, "ok"
        return answer

    def _charged_output(self, context: RequestContext) -> int:
        if not context.needs_place:
            return 0
        return self.state.output_lengths.charged_tokens(context.request, context.tenant.name)

    def _cancelled(self, context: RequestContext, client: Downstream, do: Effects) -> None:
        if (error := do.overdue(client)) is not None:
            self.endings.failed(context, error, has_answered=client.started)
        else:
            self.endings.interrupted(context, by_client=client.disconnected)


def _compared_rules(context: RequestContext) -> tuple[str, ...]:
    """The rules of chats that concern a request, if its tokens are known."""
    prompt, request = context.prompt, context.request
    if prompt is None or prompt.has_media or not request.endpoint.api.is_chat:
        return ()
    return tuple(concerned_by(request.body))


def _may_have_uuids(context: RequestContext) -> bool:
    """Whether the body may have a `uuid` that an engine reads."""
    request, prompt, api = context.request, context.prompt, context.request.endpoint.api
    if not api.takes_uuids or (api.shows_pictures and prompt is not None and not prompt.has_media):
        return False
    return len(request.body) > SEARCHED_BYTES or may_have_uuid(request.body)


TOKENS_PER_PIECE = 16_384
"""Encoded in one go: as many take half a millisecond."""


def token_answer(
    request: InferenceRequest, prompt: PromptPrefix | None, fleet: FleetSnapshot
) -> Iterator[bytes] | None:
    """The body of the answer in pieces; None if the prompt is not known exactly, or no ready pod is proven."""
    if prompt is None or prompt.has_media or prompt.others:
        return None
    proven = _proven(request, fleet)
    if request.endpoint is Endpoint.COUNT_TOKENS:
        count = prompt.token_count
        answer = b'{"input_tokens":%d,"context_management":{"original_input_tokens":%d}}' % (count, count)
        return iter([answer]) if any(True for _ in proven) else None
    count = len(prompt.tokens)
    known = (around for pod in proven if (around := ENGINES[pod.engine].around_tokens(count, pod)) is not None)
    around = next(known, None)
    return None if around is None else _listed(prompt.tokens, *around)


def _proven(request: InferenceRequest, fleet: FleetSnapshot) -> Iterator[Pod]:
    model = request.adapter or request.model
    for status in fleet.pods:
        if status.state is PodState.READY and status.pod.serves(model) and status.pod.reads_alike(request.endpoint):
            yield status.pod


def _listed(tokens: Sequence[int], head: bytes, tail: bytes) -> Iterator[bytes]:
    yield head
    for start in range(0, len(tokens), TOKENS_PER_PIECE):
        listed = msgspec.json.encode(list(tokens[start : start + TOKENS_PER_PIECE]))[1:-1]
        yield b"," + listed if start else listed
    yield tail
