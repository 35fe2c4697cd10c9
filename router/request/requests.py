"""The life of a request, without sockets.

A front reads bytes into a `RequestContext` (`reading.py`), then drives three things, which hold no socket, task or
clock: `prepare`, a generator of what it must do (`preparation_steps.py`) until the request may be sent; `tracker`,
which receives the events of its attempts; and `endings.end`, which settles it. `tests/request/memory_front.py` is a
whole front in 150 lines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from router.engines.engine_catalog import ENGINES
from router.observe.counters import Counters
from router.observe.ended import RecordedDecision
from router.phases import Phases
from router.prompt.pictures.uuids import SEARCHED_BYTES, may_have_uuid
from router.request.attempt_rules import AttemptRules
from router.request.clock import Clock
from router.request.context import RequestContext
from router.request.continuation.continuing_tracker import ContinuingTracker
from router.request.continuation.terms import REPEATED, WITH_IDS
from router.request.decisions import RequestDecisions
from router.request.endings import Endings
from router.request.fleet_state import FleetState
from router.request.inbound import Head, HeaderList
from router.request.preparation_steps import Locate, Step, Tokens, WithoutUuids
from router.request.queues import RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.response_reader import TokenCountingReader
from router.request.tracker import Tracker
from router.types import Endpoint, FleetSnapshot, InferenceRequest, Pod, PodState, PromptPrefix

CONTINUED = WITH_IDS | REPEATED
"""Endpoints whose streams another pod may continue."""


@dataclass(slots=True, eq=False, kw_only=True)
class Requests:
    state: FleetState
    decisions: RequestDecisions
    endings: Endings
    rules: AttemptRules
    counters: Counters
    clock: Clock
    charges: QuotaCharges | None
    """None where no tenant has quotas."""
    queues: RequestQueues | None
    counts_tokens: bool
    """The tokens of streams are counted as they pass: their end, with the engine's count, may never come."""
    trusts_uuids: bool
    """Pods receive the `uuid` that a client gives a picture."""

    def prepare(self, context: RequestContext) -> Generator[Step, Any, Iterator[bytes] | None]:
        """Returns the router's own answer in pieces, or None: then it may be attempted. Raises `RouterError`."""
        yield from self._begin(context)
        request = context.request
        if not context.stored_pod and (previous := request.prompt.get("previous_response_id")):
            context.stored_pod = (yield Locate(previous, "previous_response_id", context.tenant.name)).pod
        context.phases.enter("fingerprint", self.clock.now_s())
        if request.prompt:
            found = yield Tokens(request)
            context.prompt, context.unread = (found, "") if isinstance(found, PromptPrefix) else (None, found or "")
        if request.endpoint.api.is_about_tokens:
            answer, context.prompt = token_answer(request, context.prompt, self.state.fleet.snapshot), None
            if answer is not None:
                context.phases.enter("relay", self.clock.now_s())
                return answer
        if not self.trusts_uuids and _may_have_uuids(context):
            body = yield WithoutUuids(context.request.body, context.tenant)
            context.request = replace(context.request, body=body)
        self.decisions.decide(context, self.clock.now_s())
        yield from self._charge(context)
        if self.queues is not None and context.needs_place:
            yield from self.queues.wait_for_place(context)
        return None

    def _charge(self, context: RequestContext) -> Generator[Step, None, None]:
        """Count the tokens that it will probably cost. Raises `QuotaExceeded`."""
        if context.hold is not None and self.charges is not None:
            lengths, tenant = self.state.output_lengths, context.tenant.name
            output = lengths.charged_tokens(context.request, tenant) if context.needs_place else 0
            yield from self.charges.charge(context, output)

    def _begin(self, context: RequestContext) -> Generator[Step, None, None]:
        """Count one request more of its tenant. Raises `QuotaExceeded`."""
        if self.charges is not None and context.tenant.quotas:
            yield from self.charges.begin(context)
        is_counted = self.counts_tokens or (context.hold is not None and context.hold.applied.output)
        if is_counted and (context.request.stream or context.fetched):
            context.reader = TokenCountingReader(context.reader.format)

    def tracker(self, context: RequestContext) -> Tracker:
        options, request, again = self.rules.continuation, context.request, self.decisions.decide_again
        is_streamed = request.stream and request.endpoint in CONTINUED and not self.rules.hands_over
        if is_streamed and options is not None and options.may_continue(context.decision):
            return ContinuingTracker(
                context, self.state, self.rules, self.counters, options=options, decide_again=again
            )
        return Tracker(context, self.state, self.rules, self.counters)

    def preview(self, request: InferenceRequest, headers: HeaderList) -> Generator[Step, Any, RecordedDecision]:
        """The decision that would be made now. Nothing is sent, booked or counted. Raises `RouterError`."""
        head = Head(id=request.id, method="POST", target=b"", headers=headers)
        context = RequestContext(request=request, head=head, phases=Phases(self.clock.now_s()))
        if previous := request.prompt.get("previous_response_id"):
            context.stored_pod = (yield Locate(previous, "previous_response_id", None)).pod
        found = (yield Tokens(request)) if request.prompt else None
        context.prompt = found if isinstance(found, PromptPrefix) else None
        return self.decisions.preview(context)


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
    if prompt is None or prompt.has_media:
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
