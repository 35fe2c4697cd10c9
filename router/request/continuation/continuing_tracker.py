"""The attempts of one streamed request whose stream another pod may continue.

As `Tracker`, with a machine between the pod and the client: it records the stream. Once something was sent, a failure
is followed by the attempt of a later pod, whose stream is joined to it. No request has one without
`continuation.enabled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from router.decision import Candidate, RouteDecision
from router.errors import ConnectFailed, RouterError, UpstreamBroken, UpstreamError, UsageRefused
from router.observe.ended import Failure
from router.policy.decide import expected_ttft_ms
from router.request.attempt_rules import ContinuationRules
from router.request.context import RequestContext
from router.request.continuation.asked import Asked, asked_of
from router.request.continuation.joiner import Joiner
from router.request.continuation.later_pods import MOVED, move_ms, other_pod
from router.request.continuation.plan import Continue, Finish, StreamPlan, plan
from router.request.continuation.recorder import Recorder
from router.request.continuation.repeated_stream import MESSAGE_STOP, RepeatedStream, SaidEvents
from router.request.continuation.step_times import LEAST_PIECES
from router.request.continuation.stream import PodStream
from router.request.continuation.stream_events import MAX_REMEMBERED_BYTES
from router.request.continuation.terms import REPEATED
from router.request.inbound import EVENT_STREAM, HeaderList, media_type
from router.request.tracker import Tracker
from router.types import PodId, PodState

MAX_CONTINUATIONS = 2
"""Counts those of a stream whose pods fail: moves from pods that leave, as in a rolling update, are free."""
DEATHS = frozenset({"connection", "error event"})
MAX_DEATHS = 2
"""Pods that may die of one body: the second one ends the stream."""
COUNTED_EVERY, LARGE_PIECE_BYTES = 64, 4096
"""Pieces between two counts of what is remembered, unless they are large."""


@dataclass(slots=True, eq=False)
class ContinuingTracker(Tracker):
    """`decide_again` returns a new decision about the request, and what it is based on. Raises `RouterError`."""

    options: ContinuationRules = field(kw_only=True)
    decide_again: Callable[[RequestContext, float], tuple[object, RouteDecision]] = field(kw_only=True)
    asked: Asked = field(init=False)
    """What the pod of this attempt is asked for."""
    _body: bytes = b""
    _reader: PodStream | None = None
    _continuation: Continue | None = None
    """The one in progress, and why it was needed."""
    _cause: str = ""
    _continuations: int = 0
    _deaths: int = 0
    _pieces: int = 0
    _joins: bool = False
    _stays: bool = False
    is_called: bool = False
    has_ended: bool = False
    """Whether nothing that the pod still sends is for the client."""
    _gave_up: str = ""
    """Why the router closes the connection of this pod itself."""
    planned: StreamPlan | None = None
    """What `planning` has returned, for the next call of `failed`."""
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        request = self.context.request
        self.asked = Asked(request.endpoint, self.context.head, request.body)

    @property
    def body(self) -> bytes:
        return self._body

    @property
    def joins(self) -> bool:
        """Whether the stream is recorded, so that another pod may continue it."""
        return self._reader is not None

    @property
    def changes_length(self) -> bool:
        return self.joins or self._filter is not None

    @property
    def planning(self) -> Callable[[], StreamPlan] | None:
        """How the stream goes on, to be computed in a thread before `failed`, as it takes up to 40 ms; None where the
        attempt is repeated, or nothing is recorded."""
        reader, asked = self._reader, self.asked
        if not self.has_sent or reader is None:
            return None
        said = reader.current
        if reason := said.forgotten or reader.record.forgotten or ("differs" if reader.differs else ""):
            return lambda: reason
        if isinstance(reader, RepeatedStream):
            return partial(self._again, reader.record)
        return partial(plan, asked.terms, said, asked.body, asked.words)

    # --- events ---

    def begin(self, candidate: Candidate, now_s: float) -> float | None:
        self._gave_up, self._stays, self.is_called, self.has_ended, self._last_s = "", False, False, False, now_s
        if not self.has_sent:
            self.asked = asked_of(self.context, candidate, self.options)
            self._reader = None if self.asked.refusal else self._reads()
            self._body = self.asked.first_body
        return Tracker.begin(self, candidate, now_s)

    def head(self, pod: PodId, status: int, headers: HeaderList, now_s: float) -> None:
        if not self.has_sent:
            Tracker.head(self, pod, status, headers, now_s)
            if status >= 400 or not self._has_events:
                self._reader, self.asked.refusal = None, "not a stream"
                if self.asked.message is not None and status < 400:
                    raise UpstreamBroken(f"pod {pod}: status {status} without a stream", pod=pod)
        elif status != 200 or media_type(dict(headers)) != EVENT_STREAM:
            raise UpstreamBroken(f"pod {pod}: status {status} for the rest of a stream", pod=pod, status=status)
        else:
            self._pod, self._held, self._joins = pod, None, True
            self._continuations += 1
        self._last_s = now_s

    def piece(self, piece: bytes, now_s: float) -> bytes:
        """What the client gets of a piece of the pod's stream."""
        reader = self._reader
        if reader is None:
            shown = Tracker.piece(self, piece, now_s)
            self._drop_body()
            return shown
        shown = reader.feed(piece)
        if self.asked.message is not None:
            shown = self._shown(reader, shown)
        self._last_s, self.has_ended = now_s, bool(reader.fault) or reader.is_over
        if self._pieces % COUNTED_EVERY == 0 or len(piece) > LARGE_PIECE_BYTES:
            self._count_memory(reader)
        self._pieces += 1
        if self._joins or (reader.held_bytes and self.context.first_token_s is None):
            self._joins = False
            self._first_token(now_s)
        if shown:
            return Tracker.piece(self, shown, now_s)
        if self.has_sent:
            self._stepped(now_s)
        return b""

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

    @property
    def is_whole(self) -> bool:
        """Whether the client has the end of the stream, so that the pod's connection does not matter any more."""
        return self._reader is not None and self._reader.record.is_done

    def ended(self) -> None:
        """The pod sends no more. Raises `UpstreamBroken` where its stream is not whole."""
        if (reader := self._reader) is not None:
            reader.end()
            if reader.fault:
                raise UpstreamBroken(f"pod {self._pod}: {reader.fault}", pod=self._pod)

    def is_silent(self, now_s: float) -> bool:
        """Whether the pod has sent nothing of this stream for too long, is not ready any more or fails its health
        checks, and another one may go on: its connection should be closed. Health checks of a busy pod time out, too,
        and waiting for it is better than an end."""
        candidate, options = self.context.candidate, self.options
        is_continued = self._reader is not None and not self._reader.record.forgotten
        if not is_continued or candidate is None or now_s - self._last_s < options.silence_s:
            return False
        limit_s = max(options.silence_s, options.steps.silence_s(candidate.pod.id, self.context.workload))
        if self._joins or self.context.first_token_s is None:  # it computes the prompt
            limit_s += expected_ttft_ms(candidate.cost) / 1000
        if now_s - self._last_s < limit_s:
            return False
        status, breaker = self._state.fleet.status(candidate.pod.id), self._state.breaker
        if status is not None and status.state is PodState.READY and not breaker.fails_probes(candidate.pod.id):
            return False
        gives_up = self._has_all_tokens or (not self._limit() and self._other_pod(now_s) is not None)
        self._gave_up = "silence" if gives_up else ""
        return gives_up

    def move_ms(self) -> float | None:
        """What the move of this stream would cost another pod; None where it is not worth it, or its pod stays."""
        takes_ids = self._reader is not None and self.asked.words and not self.asked.terms.no_ids
        if not takes_ids or not self.has_sent or self._joins or self._stays:
            return None
        return move_ms(self._state, self.context, self._pieces, self._last_s - self.context.phases.began_s)

    def moves(self, now_s: float) -> bool:
        """Whether another pod goes on with this stream, which its front was asked to move and has `planned`."""
        self.is_called, found = False, self.planned
        goes_on = isinstance(found, Continue) and found.method == "ids" and self.move_ms() is not None
        if goes_on and not self._limit() and self._other_pod(now_s):
            self._gave_up = MOVED
            return True
        self._stays, self.planned = True, None
        return False

    def failed(self, error: UpstreamError, now_s: float) -> Candidate | None:
        if isinstance(error, UsageRefused):
            return Tracker.failed(self, error, now_s)
        candidate, reader, cause = self.context.candidate, self._reader, self._cause_of(error)
        assert candidate is not None
        is_leaving = self._state.fleet.is_leaving(candidate.pod.id)
        self._deaths += cause in DEATHS and not is_leaving
        if (planning := self.planning) is None or reader is None:
            if self.has_sent:
                self._counters.continued("none", cause, self.asked.refusal)
            return Tracker.failed(self, error, now_s)
        self.release(now_s)
        if is_leaving:
            self.context.failures = (*self.context.failures, Failure(candidate.pod.id, MOVED, str(error)))
        else:
            self._record_failure(candidate, error, now_s)
        self._count("differs" if reader.differs else "failed")
        found, self._cause, self.planned = self.planned or planning(), cause, None
        if isinstance(found, Continue):
            following = self._following(error, now_s, is_leaving=is_leaving)
            if not isinstance(following, str):
                self._continuation, self._body, self.context.answered_tokens = found, found.body, found.seam.kept
                self._reader = self._reads(reader, found)
                return following
            found = following
        if isinstance(found, Finish):
            self._counters.continued("finish", cause, "joined")
            if made := self._shown(reader, found.events):
                self.context.reader.feed(made)
                shown = made if self._filter is None else self._filter.feed(made) + self._filter.end()
                self.context.result, self.last_events = "ok", shown
        else:
            self._counters.continued("none", cause, found)
        return None

    def left(self, now_s: float) -> None:
        Tracker.left(self, now_s)
        self._count("left")

    def complete(self, now_s: float) -> None:
        Tracker.complete(self, now_s)
        self._count("joined")
        first_s = self.context.first_token_s
        if first_s is not None and self._pieces >= LEAST_PIECES and not self._continuations:
            step_s = (self._last_s - self.context.phases.began_s - first_s) / self._pieces
            self.options.steps.learn(self._pod, self.context.workload, step_s)

    def end(self, now_s: float) -> None:
        Tracker.end(self, now_s)
        self._count("failed")
        self._reader = None
        self.asked.body = self._body = b""

    def headers(self) -> HeaderList:
        headers = Tracker.headers(self)
        if self._rules.route_headers:
            refusal = self.asked.refusal
            announced = f"no; reason={refusal}" if refusal else self.asked.terms.announced
            headers.append((b"x-warmroute-continuable", announced.encode()))
        return headers

    # --- what it decides ---

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

    def _following(self, error: UpstreamError, now_s: float, *, is_leaving: bool) -> Candidate | str:
        """The pod that continues, or why none may."""
        if reason := self._limit():
            return reason
        following = self._other_pod(now_s)
        if following is None:
            return "no pod"
        if is_leaving or isinstance(error, ConnectFailed) or self._rules.budget.spend(now_s):
            return following
        self._counters.retry_refused(error.code)
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

    # --- what it counts ---

    def _count(self, result: str) -> None:
        """How the continuation in progress ended, if there is one."""
        found, self._continuation = self._continuation, None
        if found is not None:
            self._counters.continued(found.method, self._cause, result)
            self.context.continued = (*self.context.continued, found.method)

    def _count_memory(self, reader: PodStream) -> None:
        """Count what is remembered, and what waits for the rest of an event or a call, in steps. Forget it where there
        is no memory for it."""
        size, message = reader.current.size_bytes + len(self.asked.body), self.asked.message
        waits = reader.waiting_bytes + (message.waiting_bytes if message is not None else 0)
        may_forget = not isinstance(reader, Joiner)
        if size > MAX_REMEMBERED_BYTES and may_forget:
            reader.record.forget("too long")
        elif not self._has_memory(size + waits + COUNTED_EVERY * 8) and may_forget:
            reader.record.forget("memory")
        if reader.record.forgotten:
            self._drop_body()

    def _drop_body(self) -> None:
        """Free the body, which nothing needs once the client has a part of an answer that is not continued."""
        if self.has_sent:
            self.asked.body = self._body = b""
