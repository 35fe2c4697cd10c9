"""The attempts of one request: events of a front in, values out.

    first()                        the candidate to try; raises where there is none
    begin(candidate, now_s)        books its leases and predictions
    head(pod, status, headers, ..) the response has begun; raises where another candidate should be tried instead
    piece(bytes, now_s)            returns what goes to the client now
    rest(now_s)                    the pod has sent all; returns what was held until then
    complete(now_s)                the client has been sent all: counts the result
    failed(error, now_s)           returns the next candidate, or None
    left(now_s)                    the client is gone
    release(now_s)                 ends the attempt in any case; idempotent
    end(now_s)                     ends the request: pods that may have failed it are doubted; idempotent

A tracker owns the leases, predictions and observations of an attempt, and decides which failures count against a pod
(`fleet/breaker.py`) and what may be tried again (`policy/retry.py`). It has no socket, task or clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.decision import Candidate, Plan, Split
from router.engines.engine_catalog import ANSWERING
from router.engines.lacks import LACK_STATUSES, USAGE_OF_STREAMS, lacking
from router.errors import ConnectFailed, NoReadyPod, NotServed, UpstreamBroken, UpstreamError
from router.index.stored_responses import StoredResponse
from router.observe.counters import Counters
from router.observe.ended import Failure
from router.policy.decide import expected_ttft_ms
from router.policy.retry import BUSY_STATUS, DOUBTFUL_STATUS, MAX_FAILED_ATTEMPTS, RETRY_STATUSES, Retry, retry_rule
from router.request.attempt_rules import AttemptRules
from router.request.booking import AttemptPredictions, Booking
from router.request.context import RequestContext
from router.request.continuation.kept_stream import KeptStream
from router.request.continuation.later_pods import MOVED
from router.request.fallbacks import fallbacks_of
from router.request.fleet_state import FleetState
from router.request.hosted import NotAsked
from router.request.inbound import EVENT_STREAM, JSON, HeaderList, media_type
from router.request.response_reader import has_early_error
from router.request.usage_filter import UsageFilter
from router.types import Endpoint, Pod, PodId, UsageShown

UNARY_PREFILL_SLACK = 1.5
"""The first token of an unstreamed response cannot be observed: its prefill counts as done after this multiple of the
expected time."""
MAX_HELD_BYTES = 4 * 1024 * 1024
"""A larger response is sent before it is complete."""
UNCOUNTED_BYTES = 64 * 1024
"""Larger ones count among the buffered bodies of their client."""


@dataclass(slots=True, eq=False)
class Tracker:
    context: RequestContext
    _state: FleetState
    _rules: AttemptRules
    _counters: Counters
    _booking: Booking | None = None
    _predictions: AttemptPredictions | None = None
    _pod: PodId = ""
    """The pod that responds."""
    _held: list[bytes] | None = field(default_factory=list)
    """Pieces that are not sent yet; None after the first was sent."""
    _held_bytes: int = 0
    _taken_bytes: int = 0
    """What this request has of the memory for bodies."""
    _holds_all: bool = True
    """Whether the response is held until it is complete."""
    _has_events: bool = False
    """Whether the response is a stream of events, an error perhaps among them."""
    _begun: bool = False
    """Whether the first token is among the held pieces."""
    _is_sampled: bool = False
    """Whether the gaps between the pieces are measured."""
    _last_step_s: float | None = None
    _filter: UsageFilter | None = None
    """Removes usage that the client has not asked for from the stream."""
    _lack: str = ""
    """What the pod lacks, by its answer."""
    last_events: bytes = b""
    """What completes a broken stream without a pod."""
    stream: KeptStream | None = None
    """What is kept of a stream that another pod may continue."""

    @property
    def body(self) -> bytes:
        """The body for the pod of this attempt, unless a handoff changes it."""
        return self.context.request.body if self.stream is None else self.stream.body

    # --- which candidate ---

    def first(self, now_s: float) -> Candidate:
        """The first usable candidate. Raises the reason where there is none."""
        candidate, decision = self._next(), self.context.decision
        if candidate is None:
            assert decision is not None
            # A variable for the error would be a cycle with its traceback, which would keep the body in memory.
            raise self._rules.unusable_reason(self.context, decision.candidates[0].plan) or NoReadyPod(
                "No pod may serve this request."
            )
        self._rules.budget.count_request(now_s)
        return candidate

    @property
    def is_last(self) -> bool:
        """Whether nothing else may be tried once a pod has received this attempt: no candidate, and no fallback."""
        context, tried = self.context, self.context.pods_failed + 1
        if not context.repeatable:
            return True
        if tried < MAX_FAILED_ATTEMPTS and self._next() is not None:
            return False
        left = fallbacks_of(context, self._state.fleet, self._rules.hosted, tried, context.sent_s)
        return all(isinstance(one, NotAsked) for _, one in left)

    def _next(self) -> Candidate | None:
        """The next usable candidate, preferably one without pods that failed this request; None if there is none."""
        context = self.context
        assert context.decision is not None
        if context.is_picked:
            return None
        attempts = context.policy.attempts if context.policy else None
        if context.tries >= (attempts or 1 + self._rules.retries):
            return None
        rest: Sequence[Candidate] = context.decision.candidates
        if context.candidate is not None:
            failed = [failure.pod for failure in context.failures if failure.pod]
            rest = rest[rest.index(context.candidate) + 1 :]
            lacks, kind = self._lack, _kind(context.candidate.pod)
            rest = sorted(
                (one for one in rest if lacks not in one.pod.lacks),
                key=lambda one: (_uses_any(one.plan, failed), bool(lacks) and _kind(one.pod) == kind),
            )
        for candidate in rest:
            if self._rules.unusable_reason(context, candidate.plan) is None:
                return candidate
        return None

    def fallbacks(self, most: int) -> list[Candidate]:
        """The usable candidates after the one that was begun, for a gateway that tries them itself."""
        context = self.context
        assert context.decision is not None and context.candidate is not None
        candidates = context.decision.candidates
        rest = candidates[candidates.index(context.candidate) + 1 :] if most else ()
        return [one for one in rest if self._rules.unusable_reason(context, one.plan) is None][:most]

    def _may_retry(self, error: UpstreamError, now_s: float) -> bool:
        """Whether another candidate may be tried after this failure. Each call may spend retry budget."""
        rule, failed = retry_rule(error, bytes_sent=self.context.has_sent), self.context.pods_failed
        if failed and (failed >= MAX_FAILED_ATTEMPTS or not self.context.repeatable):
            return False
        allowed = rule is Retry.ALWAYS or (rule is Retry.IN_BUDGET and self._rules.budget.spend(now_s))
        if allowed:
            self._counters.retried(error.code)
        elif rule is Retry.IN_BUDGET:
            self._counters.retry_refused(error.code)
        return allowed

    def _has_budget(self, now_s: float) -> bool:
        """Whether there is retry budget for another candidate, instead of relaying an error status."""
        left = self._rules.budget.has_retry(now_s)
        if not left:
            self._counters.retry_refused(UpstreamBroken.code)
        return left

    # --- events ---

    def begin(self, candidate: Candidate, now_s: float) -> float | None:
        """Book the leases and predictions of an attempt, before its front awaits anything. Returns the seconds after
        which `assumption` is to be called; None for a stream, which shows its first token."""
        context, state, prompt = self.context, self._state, self.context.prompt
        if self.stream is not None:
            self.stream.begin(candidate, now_s)
        self._lack = ""
        if USAGE_OF_STREAMS in candidate.pod.lacks:
            context.ask_no_usage()
        context.tries += 1
        context.sent_s = now_s
        context.phases.enter("attempt", now_s)
        context.candidate = candidate
        pictures = state.pictures.seen(prompt.pictures, state.fleet.snapshot) if prompt and prompt.pictures else ()
        clock_of = state.calibrator.clock
        tokens = context.prompt_tokens + context.answered_tokens
        booking = Booking(state.ledger, candidate, tokens, clock_of, now_s, pictures)
        self._booking = booking
        self._predictions = AttemptPredictions(state, self._rules, candidate.plan, prompt, context.request)
        if context.request.stream and not context.is_unseen:
            return None
        return max(expected_ttft_ms(candidate.cost), booking.prefill_ms) / 1000 * UNARY_PREFILL_SLACK

    def handed_over(self, now_s: float) -> None:
        """The prefill pod of a split has computed the prompt: from now on it only sends KV."""
        assert self._booking is not None
        self._booking.handed_over(now_s)

    @property
    def concurrent_transfers(self) -> int:
        """Other transfers of the sender of KV when that of this attempt began."""
        return self._booking.concurrent_transfers if self._booking else 0

    @property
    def assumption(self) -> Callable[[float], None]:
        """`assume_first_token` of this attempt alone: harmless after its end, and it keeps no part of the request."""
        assert self._booking is not None
        return self._booking.assume_first_token

    def assume_first_token(self, now_s: float) -> None:
        """The first token of a response that does not show it is expected to exist by now."""
        if self._booking is not None:
            self._booking.assume_first_token(now_s)

    def head(self, pod: PodId, status: int, headers: HeaderList, now_s: float) -> None:
        """The response of a pod has begun. Raises `UpstreamBroken` where another candidate should be tried instead."""
        if self.stream is not None and self.context.has_sent:
            self.stream.rest_head(pod, status, headers, now_s)
            self._pod, self._held = pod, None
            return
        if status in RETRY_STATUSES and not self.is_last and self._has_budget(now_s):
            raise UpstreamBroken(f"pod {pod}: status {status}", pod=pod, status=status)
        context = self.context
        context.status = status
        context.phases.enter("relay", now_s)
        named = dict(headers)
        kind = media_type(named)
        self._pod, self._has_events = pod, kind == EVENT_STREAM
        request = context.request  # JSON may be a stream of objects, unless its length or the API says that it is one
        is_one = b"content-length" in named or (not request.stream and request.endpoint is not Endpoint.OTHER)
        self._holds_all = not self._has_events and (status >= 400 or (kind == JSON and is_one))
        is_opaque = kind not in (EVENT_STREAM, JSON)
        if is_opaque or context.tries > 1:
            context.reader.begin(is_opaque=is_opaque)
        self._held, self._held_bytes, self._begun = None if self._rules.hands_over else [], 0, False
        self._filter = self._usage_filter() if self._has_events and status < 400 else None
        self._is_sampled, self._last_step_s = context.request.stream and self._rules.is_sampled(), None
        if self.stream is not None:
            self.stream.head(pod, status, now_s, has_events=self._has_events)

    def piece(self, piece: bytes, now_s: float) -> bytes:
        """What goes to the client when this piece has come; nothing while it is held. An error or a JSON object is held
        until it is complete, and events that precede the prefill until the next one: a pod that fails until then can
        be replaced. Everything else may be made while it is sent. Raises `UpstreamBroken` where what was held says
        so."""
        if self.stream is not None and self.stream.is_recorded:
            piece = self._kept(self.stream, piece, now_s)
            if not piece:
                return b""
        has_token, held = self.context.reader.feed(piece), self._held
        if held is not None:
            if held:
                self.received(now_s)
            held.append(piece)
            self._held_bytes += len(piece)
            self._begun |= has_token
            may_hold = self._held_bytes < MAX_HELD_BYTES and (self._holds_all or self.context.reader.in_preamble)
            if may_hold and (self._held_bytes < UNCOUNTED_BYTES or self._has_memory(self._held_bytes)):
                return b""
            return self._release_held(now_s)
        if has_token:
            self._first_token(now_s)
        self._stepped(now_s)
        one, is_marked = self._filter, self.context.reader.is_marked
        if one is not None and (is_marked or one.mark in piece or one.is_waiting):
            return one.feed(piece, may_have_usage=is_marked)
        return piece

    def _kept(self, stream: KeptStream, piece: bytes, now_s: float) -> bytes:
        """What the client gets of a piece of a stream that another pod may continue."""
        shown, is_computed = stream.feed(piece, now_s)
        if (size_bytes := stream.counted_bytes(piece)) and not self._has_memory(size_bytes):
            stream.forget("memory")
        if self.context.has_sent and stream.is_forgotten:
            stream.drop_body()
        if is_computed:
            self._first_token(now_s)
        if not shown and self.context.has_sent:
            self._stepped(now_s)
        return shown

    def received(self, now_s: float) -> None:
        """A part of the response has come, which may be no step."""
        self._state.fleet.received(self._pod, now_s)

    def rest(self, now_s: float) -> bytes:
        """The pod has sent all: what was held until now, for the client. Raises as `piece`."""
        held = b"" if self._held is None else self._release_held(now_s)
        return held if self._filter is None else held + self._filter.end()

    @property
    def changes_length(self) -> bool:
        """Whether the client may get another number of bytes than the pod sends."""
        return self._filter is not None or (self.stream is not None and self.stream.is_recorded)

    def _usage_filter(self) -> UsageFilter | None:
        """None where the client sees all that the pod sends."""
        candidate, usage = self.context.candidate, self.context.request.usage
        assert candidate is not None
        hides_total = usage is UsageShown.NONE
        hides_steps = usage is not UsageShown.ALL and ANSWERING[candidate.plan.pod.engine].may_force_usage
        if not (hides_total or hides_steps):
            return None
        return UsageFilter(hides_total, hides_steps, is_single=self.context.request.choices == 1)

    def failed(self, error: UpstreamError, now_s: float) -> Candidate | None:
        """The attempt failed. Returns the next candidate; None where none may be tried."""
        candidate = self.context.candidate
        assert candidate is not None
        self.release(now_s)
        if isinstance(error, NotServed):
            if self._lack == USAGE_OF_STREAMS:
                self.context.ask_no_usage()
                return candidate
            self._counters.attempt_ended(error.pod, error.code)
            self._counters.retried(error.code)
            self.context.failures = (*self.context.failures, Failure(error.pod, error.code, str(error)))
            return self._next()
        if self.stream is not None and self.stream.breaks(error):
            return self._continued(self.stream, candidate, error, now_s)
        self._record_failure(candidate, error, now_s)
        following = self._next()
        return following if following is not None and self._may_retry(error, now_s) else None

    def _continued(
        self, stream: KeptStream, candidate: Candidate, error: UpstreamError, now_s: float
    ) -> Candidate | None:
        """The candidate that goes on with a broken stream; None where it has ended, perhaps with `last_events`."""
        context = self.context
        if stream.is_leaving:
            context.failures = (*context.failures, Failure(candidate.pod.id, MOVED, str(error)))
        else:
            self._record_failure(candidate, error, now_s)
        found = stream.goes_on(error, now_s)
        if isinstance(found, Candidate):
            return found
        if found:
            context.reader.feed(found)
            context.result = "ok"
            self.last_events = found if self._filter is None else self._filter.feed(found) + self._filter.end()
        return None

    def left(self, now_s: float) -> None:
        """The client is gone, or the router stops."""
        if self.stream is not None:
            self.stream.count("left")
        if self._booking is not None and self._booking.prefill_done and self._predictions is not None:
            assert self.context.candidate is not None
            self._predictions.first_token(self.context.candidate.pod.id, now_s)

    def release(self, now_s: float) -> None:
        """End the attempt: its leases and predictions. Idempotent."""
        booking, predictions = self._booking, self._predictions
        if booking is None or predictions is None:
            return
        self._booking = self._predictions = None
        self._held = []
        if booking.has_handed_over:
            predictions.computed(self.context.prefill_pod, now_s)
        predictions.withdraw()
        booking.release(now_s)
        self._observe_speed(booking, now_s)

    def end(self, now_s: float) -> None:
        """End the request. Where no pod served it, the pods or the request may be the cause. Idempotent."""
        self.release(now_s)
        if self.stream is not None:
            self.stream.end()
        if self._taken_bytes:
            self._rules.memory.give_back(self.context.owner, self._taken_bytes)
            self._taken_bytes = 0
        suspects, self.context.suspects = self.context.suspects, ()
        for pod in suspects:
            self._state.breaker.doubt(pod, self.context.client, now_s)

    # --- what the events change ---

    def _has_memory(self, size_bytes: int) -> bool:
        """Count a size among the buffered bodies, until the client has been sent all. Whether there is room for it."""
        more, context = size_bytes - self._taken_bytes, self.context
        if more > 0:
            if not self._rules.memory.take(context.owner, context.tenant.weight, more):
                return False
            self._taken_bytes += more
        return True

    def _release_held(self, now_s: float) -> bytes:
        held = self._held or []
        joined = held[0] if len(held) == 1 else b"".join(held)
        if self._says_dead(joined) and not self.is_last and self._has_budget(now_s):
            raise UpstreamBroken(f"pod {self._pod}: its engine is dead", pod=self._pod)
        is_error = self.context.status >= 400
        if is_error and self.says_lack(joined) and (self._lack == USAGE_OF_STREAMS or self._next() is not None):
            raise NotServed(f"pod {self._pod} does not serve {self._lack}", pod=self._pod)
        self._held, self.context.has_sent = None, True
        if self.stream is not None and not self.stream.is_recorded:
            self.stream.drop_body()
        if self._begun:
            self._first_token(now_s)
        if held:
            self._stepped(now_s)
        may_have_usage = len(held) != 1 or self.context.reader.is_marked
        return joined if self._filter is None else self._filter.feed(joined, may_have_usage=may_have_usage)

    def says_lack(self, said: bytes) -> bool:
        """Whether the pod says that it lacks what the request needs. The pod is asked for it."""
        context = self.context
        if context.status in LACK_STATUSES and context.candidate is not None:
            pod = context.candidate.pod
            self._lack = lacking(ANSWERING[pod.engine].lack_answers, context.status, said, context.asks)
            if self._lack:
                self._rules.suspect(pod, self._lack)
        return bool(self._lack)

    def _says_dead(self, held: bytes) -> bool:
        """Whether a held error says that the pod's engine is gone. The answer of a model may say so, too."""
        candidate = self.context.candidate
        assert candidate is not None
        is_error = self.context.status == DOUBTFUL_STATUS or (self._has_events and has_early_error(held))
        return is_error and ANSWERING[candidate.plan.pod.engine].is_dead(held)

    def _stepped(self, now_s: float) -> None:
        """A piece has come: about one decode step of the pod that answers."""
        context = self.context
        self._state.ledger.stepped(self._pod, now_s)
        if self._is_sampled:
            if self._last_step_s is not None:
                self._counters.token_gap(context.request.model, context.workload, now_s - self._last_step_s)
            self._last_step_s = now_s

    def _first_token(self, now_s: float) -> None:
        context, booking, predictions = self.context, self._booking, self._predictions
        assert context.candidate is not None and booking is not None and predictions is not None
        if context.status >= 400:
            return  # an error response may repeat parts of the prompt
        if context.first_token_s is None:
            context.first_token_s = now_s - context.phases.began_s
        booking.first_token(now_s)
        predictions.first_token(self._pod, now_s)
        self._state.breaker.seen_alive(self._pod)
        if context.reader.response_id and context.may_be_stored:
            self._store(now_s)
        if context.suspects:
            self._count_failures(context.candidate.plan, now_s)
        if context.request.stream and not context.prefill_pod:
            context.drop_prompt()

    def _store(self, now_s: float) -> None:
        """Record which pod has the response, before the client receives its id."""
        request, owner = self.context.request, self.context.tenant.name
        model = request.adapter or request.model
        self._state.stored.learn(StoredResponse(self.context.reader.response_id, self._pod, model, now_s, owner), now_s)

    def _record_failure(self, candidate: Candidate, error: UpstreamError, now_s: float) -> None:
        """Count the failure, also for the breaker of the pod that caused it, if any. Where the request may be the
        cause, the pod is a suspect until another pod serves the request."""
        context, breaker = self.context, self._state.breaker
        self._counters.attempt_ended(error.pod or candidate.pod.id, error.code)
        context.failures = (*context.failures, Failure(error.pod, error.code, str(error)))
        if isinstance(error, ConnectFailed):
            if not error.local:
                breaker.failure(error.pod, now_s)
            return
        if isinstance(error, UpstreamBroken) and error.status == BUSY_STATUS:
            return
        breaker.ended(error.pod, context.owner, now_s, is_served=False)
        if error.doubtful or context.has_sent:
            breaker.doubt(error.pod, context.client, now_s)
        if not context.has_sent:
            context.suspects = (*context.suspects, "" if error.doubtful else error.pod)
            context.pods_failed += candidate.money is None

    def unseen(self, now_s: float) -> None:
        """The response of which only the status was seen has ended: its prompt was computed."""
        if self.context.status < 400:
            self.assume_first_token(now_s)
            self.left(now_s)

    def complete(self, now_s: float) -> None:
        """The client has been sent the whole response. Counts its result."""
        context, status = self.context, self.context.status
        assert context.candidate is not None
        context.result = "ok" if status < 400 else "pod_refused" if status < 500 or self._lack else "pod_error"
        self._counters.attempt_ended(self._pod, context.result)
        breaker, is_served = self._state.breaker, status < 400
        if status != BUSY_STATUS and not self._lack and (not is_served or breaker.counts_success(now_s)):
            breaker.ended(self._pod, context.owner, now_s, is_served=is_served)
        if is_served:
            if context.suspects:
                self._count_failures(context.candidate.plan, now_s)
            breaker.success(self._pod)
        elif status in RETRY_STATUSES or status == DOUBTFUL_STATUS:
            context.suspects = (*context.suspects, self._pod)
        if self.stream is not None:
            self.stream.complete(self._pod)

    def _count_failures(self, plan: Plan, now_s: float) -> None:
        """The pods of `plan` serve the request, so it is not the cause of earlier failures of other pods."""
        for pod in self.context.suspects:
            if not _uses_any(plan, [pod]):
                self._state.breaker.failure(pod, now_s)
        self.context.suspects = ()

    def _observe_speed(self, booking: Booking, now_s: float) -> None:
        """Calibrate the speed of the pod that computed the prompt, and of the link that it pulled over."""
        calibrator, context, seen = self._state.calibrator, self.context, booking.observation
        assert context.candidate is not None
        if booking.pulled_ms is not None:
            self._observe_pull(context.candidate, booking.pulled_ms, booking.concurrent_transfers)
        if seen is None or context.prompt is None or context.prompt.has_media:
            return
        plan = context.candidate.plan
        pod = plan.prefill if isinstance(plan, Split) else plan.pod
        if calibrator.wants_observation(pod, now_s):
            if (found := context.cached_tokens) is not None:
                seen = seen.corrected(context.candidate.cached_tokens, found)
            calibrator.observe_prefill(pod, seen, now_s)

    def _observe_pull(self, candidate: Candidate, elapsed_ms: float, concurrent: int) -> None:
        """Calibrate the link: pulling and computing the rest of the prompt took `elapsed_ms` on an idle pod."""
        plan, prefill_ms = candidate.plan, dict(candidate.cost.parts).get("prefill", 0.0)
        status = self._state.fleet.status(plan.pull.holder) if plan.pull else None
        if plan.pull and status:
            tokens, transfer_ms = plan.pull.pulled_tokens, elapsed_ms - prefill_ms
            self._state.calibrator.observe_transfer(status.pod, plan.pod, tokens, transfer_ms, concurrent)

    def headers(self) -> HeaderList:
        headers = self._rules.added_headers(self.context)
        if self.stream is not None and self._rules.route_headers:
            headers.append((b"x-warmroute-continuable", self.stream.announced))
        return headers


def _kind(pod: Pod) -> tuple[str, ...]:
    """Pods of one kind lack the same."""
    return pod.engine, pod.version, pod.front_end


def _uses_any(plan: Plan, pods: Sequence[PodId]) -> bool:
    return plan.pod.id in pods or (isinstance(plan, Split) and plan.prefill.id in pods)
