"""What a tracker keeps of a stream that another pod may continue.

It stands between the pod and the client, and records the stream. Once something was sent, a failure is followed by the
attempt of a later pod, whose stream is joined to it. No tracker has one without `continuation.enabled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import msgspec
from msgspec.structs import replace

from router.apis.openai import CHAT
from router.decision import Candidate, Direct, RouteDecision
from router.errors import ConnectFailed, RouterError, UpstreamBroken, UpstreamError
from router.observe.counters import Counters
from router.policy.decide import expected_ttft_ms
from router.request.attempt_rules import AttemptRules, ContinuationRules
from router.request.context import RequestContext
from router.request.continuation.answer_words import AnswerWords
from router.request.continuation.joiner import Joiner
from router.request.continuation.later_pods import LEAST_PIECES, MOVED, move_ms, other_pod
from router.request.continuation.messages import MessageStream, chat_of, converts
from router.request.continuation.plan import Continue, Finish, StreamPlan, first_body, plan
from router.request.continuation.repeated_stream import MESSAGE_STOP, RepeatedStream, SaidEvents
from router.request.continuation.stream import PodStream, Recorder
from router.request.continuation.stream_events import MAX_REMEMBERED_BYTES
from router.request.continuation.terms import REPEATED, Terms, terms_of
from router.request.effects import Effects
from router.request.fleet_state import FleetState
from router.request.inbound import EVENT_STREAM, Head, HeaderList, media_type
from router.types import Endpoint, PodId, PodState, UsageShown

MAX_CONTINUATIONS = 2
"""Counts those of a stream whose pods fail: moves from pods that leave, as in a rolling update, are free."""
DEATHS = frozenset({"connection", "error event"})
MAX_DEATHS = 2
"""Pods that may die of one body: the second one ends the stream."""
COUNTED_EVERY, LARGE_PIECE_BYTES = 64, 4096
"""Pieces between two counts of what is remembered, unless they are large."""


class StreamState(Enum):
    """What may become of the stream of one pod."""

    FLOWS = auto()
    JOINS = auto()
    """A later pod computes what the client has; nothing of its stream has come."""
    CALLED = auto()
    """It should leave its pod, once the front has sent what has come."""
    STAYS = auto()
    """It was called, and does not leave its pod."""
    ENDED = auto()
    """Nothing that the pod still sends is for the client."""


@dataclass(slots=True, eq=False)
class KeptStream:
    """`decide_again` returns a new decision about the request, and what it is based on. Raises `RouterError`."""

    context: RequestContext
    fleet_state: FleetState
    rules: AttemptRules
    counters: Counters
    decide_again: Callable[[RequestContext, float], tuple[object, RouteDecision]]
    asked: Asked = field(init=False)
    """What the pod of this attempt is asked for."""
    body: bytes = b""
    state: StreamState = StreamState.FLOWS
    _reader: PodStream | None = None
    _continuation: Continue | None = None
    """The one in progress, and why it was needed."""
    _cause: str = ""
    _continuations: int = 0
    _deaths: int = 0
    _pieces: int = 0
    _gave_up: str = ""
    """Why the router closes the connection of this pod itself."""
    _planned: StreamPlan | None = None
    """How the stream goes on after this attempt."""
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        self.asked = Asked(self.context.request.endpoint, self.context.head, self.context.request.body)

    @property
    def options(self) -> ContinuationRules:
        assert self.rules.continuation is not None
        return self.rules.continuation

    @property
    def is_recorded(self) -> bool:
        """Whether another pod may continue it."""
        return self._reader is not None

    @property
    def is_whole(self) -> bool:
        """Whether the client has the end of the stream, so that the pod's connection does not matter any more."""
        return self._reader is not None and self._reader.record.is_done

    @property
    def is_forgotten(self) -> bool:
        """Whether no other pod may continue what the client has."""
        return self._reader is None or bool(self._reader.record.forgotten)

    @property
    def announced(self) -> bytes:
        """Whether it may be continued, for the client."""
        refusal = self.asked.refusal
        return (f"no; reason={refusal}" if refusal else self.asked.terms.announced).encode()

    # --- events of a tracker ---

    def begin(self, candidate: Candidate, now_s: float) -> None:
        self._gave_up, self._last_s = "", now_s
        self.state = StreamState.FLOWS
        if not self.context.has_sent:
            self.asked = asked_of(self.context, candidate, self.options)
            self._reader = None if self.asked.refusal else self._reads()
            self.body = self.asked.first_body

    def head(self, pod: PodId, status: int, now_s: float, *, has_events: bool) -> None:
        """The response to the whole request has begun. Raises `UpstreamBroken`."""
        self._last_s = now_s
        if status >= 400 or not has_events:
            self._reader, self.asked.refusal = None, "not a stream"
            if self.asked.message is not None and status < 400:
                raise UpstreamBroken(f"pod {pod}: status {status} without a stream", pod=pod)

    def rest_head(self, pod: PodId, status: int, headers: HeaderList, now_s: float) -> None:
        """The response to the rest of a stream has begun. Raises `UpstreamBroken`."""
        if status != 200 or media_type(dict(headers)) != EVENT_STREAM:
            raise UpstreamBroken(f"pod {pod}: status {status} for the rest of a stream", pod=pod, status=status)
        self._last_s, self.state = now_s, StreamState.JOINS
        self._continuations += 1

    def feed(self, piece: bytes, now_s: float) -> tuple[bytes, bool]:
        """What the client gets of a piece of the pod's stream, and whether it shows that the prompt is computed."""
        reader, joins = self._reader, self.state is StreamState.JOINS
        assert reader is not None
        shown = self._shown(reader, reader.feed(piece))
        self._last_s = now_s
        self._pieces += 1
        if reader.fault or reader.is_over:
            self.state = StreamState.ENDED
        elif joins:
            self.state = StreamState.FLOWS
        return shown, joins or (reader.held_bytes > 0 and self.context.first_token_s is None)

    def counted_bytes(self, piece: bytes) -> int:
        """What this stream takes of the memory for bodies, with what waits for the rest of an event or a call; 0 where
        that is not counted after this piece."""
        reader, message = self._reader, self.asked.message
        if reader is None or ((self._pieces - 1) % COUNTED_EVERY and len(piece) <= LARGE_PIECE_BYTES):
            return 0
        size = reader.current.size_bytes + len(self.asked.body)
        if size > MAX_REMEMBERED_BYTES and not isinstance(reader, Joiner):
            self.forget("too long")
            return 0
        waits = reader.waiting_bytes + (message.waiting_bytes if message is not None else 0)
        return size + waits + COUNTED_EVERY * 8

    def forget(self, why: str) -> None:
        """Continue it no more. What is being joined is remembered to its end."""
        if self._reader is not None and not isinstance(self._reader, Joiner):
            self._reader.record.forget(why)

    def drop_body(self) -> None:
        """Free the body, which nothing needs once the client has a part of an answer that is not continued."""
        self.asked.body = self.body = b""

    def pod_ended(self, pod: PodId) -> None:
        """The pod sends no more. Raises `UpstreamBroken` where its stream is not whole."""
        if (reader := self._reader) is not None:
            reader.end()
            if reader.fault:
                raise UpstreamBroken(f"pod {pod}: {reader.fault}", pod=pod)

    def breaks(self, error: UpstreamError) -> bool:
        """The pod has failed. Whether the client has something that another pod can continue, or that can be ended."""
        cause = self._cause_of(error)
        self._deaths += cause in DEATHS and not self.is_leaving
        if self._planning is None or self._reader is None:
            if self.context.has_sent:
                self.counters.continued("none", cause, self.asked.refusal)
            return False
        self.count("differs" if self._reader.differs else "failed")
        self._cause = cause
        return True

    def goes_on(self, error: UpstreamError, now_s: float) -> Candidate | bytes:
        """The candidate that continues the stream, or what its end lacks; b"" where it stays broken."""
        reader, planning = self._reader, self._planning
        assert reader is not None and planning is not None
        found, self._planned = self._planned or planning(), None
        if isinstance(found, Continue):
            following = self._following(error, now_s)
            if not isinstance(following, str):
                self._continuation, self.body, self.context.answered_tokens = found, found.body, found.seam.kept
                self._reader = self._reads(reader, found)
                return following
            found = following
        if isinstance(found, Finish):
            self.counters.continued("finish", self._cause, "joined")
            return self._shown(reader, found.events)
        self.counters.continued("none", self._cause, found)
        return b""

    def complete(self, pod: PodId) -> None:
        self.count("joined")
        first_s = self.context.first_token_s
        if first_s is not None and self._pieces >= LEAST_PIECES and not self._continuations:
            step_s = (self._last_s - self.context.phases.began_s - first_s) / self._pieces
            self.options.steps.learn(pod, self.context.workload, step_s)

    def end(self) -> None:
        self.count("failed")
        self._reader = None
        self.drop_body()

    def count(self, result: str) -> None:
        """How the continuation in progress ended, if there is one."""
        found, self._continuation = self._continuation, None
        if found is not None:
            self.counters.continued(found.method, self._cause, result)
            self.context.continued = (*self.context.continued, found.method)

    # --- pods that are silent, or leave ---

    @property
    def is_leaving(self) -> bool:
        """Whether its pod is drained."""
        candidate = self.context.candidate
        return candidate is not None and self.fleet_state.fleet.is_leaving(candidate.pod.id)

    def is_silent(self, now_s: float) -> bool:
        """Whether the pod has sent nothing of this stream for too long, is not ready any more or fails its health
        checks, and another one may go on: its connection should be closed. Health checks of a busy pod time out, too,
        and waiting for it is better than an end."""
        candidate, options = self.context.candidate, self.options
        if self.is_forgotten or candidate is None or now_s - self._last_s < options.silence_s:
            return False
        limit_s = max(options.silence_s, options.steps.silence_s(candidate.pod.id, self.context.workload))
        if self.state is StreamState.JOINS or self.context.first_token_s is None:  # it computes the prompt
            limit_s += expected_ttft_ms(candidate.cost) / 1000
        if now_s - self._last_s < limit_s:
            return False
        status, breaker = self.fleet_state.fleet.status(candidate.pod.id), self.fleet_state.breaker
        if status is not None and status.state is PodState.READY and not breaker.fails_probes(candidate.pod.id):
            return False
        gives_up = self._has_all_tokens or (not self._limit() and self._other_pod(now_s) is not None)
        self._gave_up = "silence" if gives_up else ""
        return gives_up

    def move_ms(self) -> float | None:
        """What the move of this stream would cost another pod; None where it is not worth it, or its pod stays."""
        takes_ids = self._reader is not None and self.asked.words and not self.asked.terms.no_ids
        if not takes_ids or not self.context.has_sent or self.state in (StreamState.JOINS, StreamState.STAYS):
            return None
        return move_ms(self.fleet_state, self.context, self._pieces, self._last_s - self.context.phases.began_s)

    def call(self) -> None:
        """Let the stream leave its pod, as soon as the front asks whether it `moves`."""
        if self.state is StreamState.FLOWS:
            self.state = StreamState.CALLED

    async def moves(self, now_s: Callable[[], float], do: Effects) -> bool:
        """Whether another pod goes on with this stream, which was called."""
        await self.plan(do)
        found, self.state = self._planned, StreamState.FLOWS
        goes_on = isinstance(found, Continue) and found.method == "ids" and self.move_ms() is not None
        if goes_on and not self._limit() and self._other_pod(now_s()):
            self._gave_up = MOVED
            return True
        self.state, self._planned = StreamState.STAYS, None
        return False

    # --- what it decides ---

    async def plan(self, do: Effects) -> None:
        """Decide how the stream goes on, for the next call of `moves` or `goes_on`."""
        if self._planned is None and (planning := self._planning) is not None:
            self._planned = await do.in_thread(planning)

    @property
    def _planning(self) -> Callable[[], StreamPlan] | None:
        """Decides how the stream goes on, which takes up to 40 ms; None where the attempt is repeated, or nothing is
        recorded."""
        reader, asked = self._reader, self.asked
        if not self.context.has_sent or reader is None:
            return None
        said = reader.current
        if reason := said.forgotten or reader.record.forgotten or ("differs" if reader.differs else ""):
            return lambda: reason
        if isinstance(reader, RepeatedStream):
            return partial(self._again, reader.record)
        return partial(plan, asked.terms, said, asked.body, asked.words)

    def _shown(self, reader: PodStream, events: bytes) -> bytes:
        """What the client gets of events: those of its message."""
        if self.asked.message is None or not events:
            return events
        try:
            if reader.record.forgotten != "unreadable":
                return self.asked.message.feed(events)
        except (ValueError, LookupError, TypeError, AttributeError):
            reader.record.forget("unreadable")
        reader.fault = "unreadable event"
        return b""

    def _again(self, said: SaidEvents) -> Continue | Finish:
        """The same request again. The client knows its response by the id of the first one."""
        if said.is_finished:
            return Finish(MESSAGE_STOP)
        body, response_id = self.asked.body, self.context.reader.response_id
        if response_id:
            body = body.rstrip()[:-1] + b',"request_id":"' + response_id.encode() + b'"}'
        return Continue(method="replay", body=body, prompt=[])

    def _reads(self, before: PodStream | None = None, found: Continue | None = None) -> PodStream:
        """What reads the stream of the first pod, or of one that goes on as `found` after another one."""
        if self.asked.endpoint in REPEATED:
            said = before.record if isinstance(before, RepeatedStream) else SaidEvents()
            return RepeatedStream(self.asked.terms, said)
        if before is None or found is None or (isinstance(before, Recorder) and not before.has_begun):
            asks_ids = self.asked.words is not None  # the client has only comments
            return Recorder(self.asked.terms, asks_ids=asks_ids)
        return Joiner(self.asked.terms, before.current, found, self.asked.words)

    def _following(self, error: UpstreamError, now_s: float) -> Candidate | str:
        """The pod that continues, or why none may."""
        if reason := self._limit():
            return reason
        following = self._other_pod(now_s)
        if following is None:
            return "no pod"
        if self.is_leaving or isinstance(error, ConnectFailed) or self.rules.budget.spend(now_s):
            return following
        self.counters.retry_refused(error.code)
        return "retry budget"

    @property
    def _has_all_tokens(self) -> bool:
        """Whether the end of the stream can be made without a pod."""
        assert self._reader is not None
        record, most = self._reader.current, self.asked.terms.max_tokens
        return record.is_finished or (most is not None and len(record.ids) >= most)

    def _limit(self) -> str:
        """Which limit of continuations the stream has reached."""
        if self._deaths >= MAX_DEATHS:
            return "two pods failed"
        moves = sum(one.error == MOVED for one in self.context.failures)
        failures = len(self.context.failures) - moves
        is_spent = self._continuations - moves >= MAX_CONTINUATIONS or failures > 2 * MAX_CONTINUATIONS
        return "two continuations" if is_spent else ""

    def _cause_of(self, error: UpstreamError) -> str:
        if self._gave_up:
            return self._gave_up
        if isinstance(error, UpstreamBroken) and error.status:
            return "status"
        fault = self._reader.fault if self._reader is not None else ""
        return fault or ("connect" if isinstance(error, ConnectFailed) else "connection")

    def _other_pod(self, now_s: float) -> Candidate | None:
        """The best candidate of a new decision, on a pod that has not failed this request and is like the first one."""
        try:
            _, decision = self.decide_again(self.context, now_s)
            return other_pod(self.context, decision, self.asked.endpoint)
        except RouterError:
            return None


# --- what a pod is asked for: what the client asks for, or the chat in place of a message ---


class Asked(msgspec.Struct):
    """`words`: of the model, where ids are asked for. `message` writes the client's message from the stream of a
    chat."""

    endpoint: Endpoint
    head: Head
    body: bytes
    terms: Terms = Terms()
    refusal: str = ""
    """Why the stream cannot be continued."""
    words: AnswerWords | None = None
    message: MessageStream | None = None

    @property
    def first_body(self) -> bytes:
        """The body for the first pod."""
        return first_body(self.body, self.terms) if self.words is not None else self.body


def asked_of(context: RequestContext, candidate: Candidate, options: ContinuationRules) -> Asked:
    """What the pod of a candidate is asked for. A sampled message is asked for as the chat that vLLM makes of it, if
    that can be continued."""
    request = context.request
    if options.only_proven and not candidate.pod.continues:
        return Asked(request.endpoint, context.head, request.body, refusal="engine")
    words = None if request.adapter else options.words_of(request.model)
    asked = _asked(context, candidate, words, request.endpoint, request.body)
    is_message = request.endpoint is Endpoint.MESSAGES and asked.refusal == "sampled"
    if not is_message or words is None or words.messages is None or not converts(candidate.pod):
        return asked
    if not (body := chat_of(request.body, words.messages)):
        return asked
    chat = _asked(context, candidate, words, Endpoint.CHAT, body)
    if chat.refusal:
        return replace(asked, refusal=chat.refusal)
    return replace(chat, head=replace(context.head, target=CHAT.path.encode()), message=MessageStream())


def _asked(
    context: RequestContext, candidate: Candidate, words: AnswerWords | None, endpoint: Endpoint, body: bytes
) -> Asked:
    words = words if endpoint in candidate.pod.continues else None
    prompt, policy = context.prompt, context.policy
    terms = terms_of(
        endpoint,
        body,
        has_media=prompt is not None and prompt.has_media,
        holds_calls=policy is not None and policy.hold_tool_calls,
        shows_usage=context.request.usage is not UsageShown.NONE,
    )
    refusal = _refusal(context, candidate, terms, takes_ids=words is not None)
    return Asked(endpoint, context.head, body, terms, refusal, None if refusal else words)


def _refusal(context: RequestContext, candidate: Candidate, terms: Terms, *, takes_ids: bool) -> str:
    """Why a stream of this candidate cannot be continued. `takes_ids`: whether its pod has shown that it does."""
    decision = context.decision
    if terms.refusal or context.request.prompts != 1:
        return terms.refusal or "n"
    if not context.repeatable:
        return "not repeatable"
    if not isinstance(candidate.plan, Direct) or candidate.plan.pull is not None:
        return "handoff"
    if decision is None or len({one.pod.id for one in decision.candidates}) < 2:
        return "one pod"
    if candidate.pod.dp_rank is not None:
        return "rank"
    can_go_on = not terms.no_replay or (takes_ids and not terms.no_ids)
    return "" if can_go_on else terms.no_ids if takes_ids else "engine"
