"""One request of a session in the core of a router: the front of the simulation, which moves no bytes."""

from __future__ import annotations

import types
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, cast

from loadtest.simulator.outcome import RequestOutcome
from loadtest.simulator.router_view import RouterView
from loadtest.simulator.traffic import Session, TrafficRequest
from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_order import Waiting
from router.admission.tenant import Tenant
from router.decision import Candidate, Split
from router.errors import HandoffFailed, RouterError
from router.phases import Phases
from router.request.context import RequestContext
from router.request.continuation.later_pods import other_pod
from router.request.effects import Downstream, Effects
from router.request.inbound import EVENT_STREAM, Head
from router.request.tracker import Tracker
from router.types import Endpoint, Generation, InferenceRequest, PodId, PromptPrefix

_PROMPT = {"prompt": ""}
"""Its tokens are asked of the front."""
_EVENTS = [(b"content-type", EVENT_STREAM)]
_FIRST_TOKEN = b'data: {"choices":[{"index":0,"text":"."}]}\n\n'
_END = (
    b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\ndata: [DONE]\n\n'
)
_REFUSED = 400


def new_context(request_id: str, session: str, tenant: Tenant, model: str, now_s: float) -> RequestContext:
    """A streamed completion. Neither its prompt nor the length of its answer is in it."""
    request = InferenceRequest(
        id=request_id,
        endpoint=Endpoint.COMPLETIONS,
        model=model,
        body=b"{}",
        stream=True,
        tenant=tenant.name,
        session=session,
        prompt=_PROMPT,
    )
    return RequestContext(request, Head(request_id, "POST", b"/v1/completions", []), Phases(now_s), tenant)


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Wait until the coroutine is resumed."""
    yield


class Pods(Protocol):
    """The simulated world of a request."""

    def attempt(self, turn: SessionTurn, candidate: Candidate) -> None:
        """The request is sent to the pods of a candidate. Raises `RouterError` to refuse it."""

    def ended(self, turn: SessionTurn, refused: str) -> None:
        """The request has ended. `refused`: why, if it was not served."""


@dataclass(eq=False)
class SessionTurn:
    """Drives one request through the core that its router has now; a restart changes nothing for it. It is client and
    front at once."""

    pods: Pods
    router: RouterView
    context: RequestContext
    session: Session
    number: int
    generation: Generation
    outcome: RequestOutcome
    waiting: dict[Waiting, SessionTurn]
    """All that wait in front of the fleet."""
    started = False
    disconnected = False
    was_slow = False

    def __post_init__(self) -> None:
        self.core, self._streams = self.router.core, self.router.streams
        self.request: TrafficRequest = self.session.requests[self.number]
        """What the pod is sent: once the stream has moved, with the answer so far."""
        self._life = self.core.serve(self.context, cast(Downstream, self), cast(Effects, self))
        self._tracker: Tracker | None = None
        self._refusal: RouterError | None = None

    def resume(self, error: Exception | None = None) -> None:
        """Go on until the request waits for the next event, or has ended."""
        try:
            if error is None:
                self._life.send(None)
            else:
                self._life.throw(error)
        except StopIteration:
            self.pods.ended(self, self.outcome.refused)
        except RouterError as refusal:
            self.pods.ended(self, refusal.code)

    def refuse(self, error: RouterError) -> None:
        """End the request at once."""
        self._refusal = error
        self._life.close()
        self.pods.ended(self, error.code)

    # --- effects ---

    async def tokens(self, request: InferenceRequest) -> PromptPrefix:
        return PromptPrefix(self.generation, range(self.request.prompt_tokens), self.request.prompt_hashes)

    async def turn(self, queue: AdmissionQueue, one: Waiting) -> None:
        assert self.core.queues is not None
        self.waiting[one] = self
        self.router.send_waiting(self.core.queues, queue, self)
        await pause()

    def go(self, one: Waiting, error: Exception | None) -> None:
        self.waiting.pop(one).resume(error)

    async def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> None:
        self._tracker = tracker
        self.pods.attempt(self, candidate)
        await pause()

    def overdue(self, client: Downstream) -> RouterError | None:
        return self._refusal

    # --- what pods do ---

    @property
    def tracker(self) -> Tracker:
        assert self._tracker is not None
        return self._tracker

    def awaits_handoff(self, pod: PodId) -> bool:
        """Whether another pod decodes after that pod's prefill. The prefill pod sends an answer of one token itself."""
        return self.request.output_tokens > 1 and pod == self.context.prefill_pod

    def computed(self, cached_tokens: int) -> None:
        """The prefill pod of a split has responded."""
        self.context.handed_over_cached_tokens = cached_tokens
        self.tracker.handed_over(self.core.clock.now_s())

    def first_token(self, pod: PodId) -> None:
        self._streams[pod] += 1
        now_s = self.core.clock.now_s()
        self.tracker.head(pod, 200, _EVENTS, now_s)
        self.tracker.piece(_FIRST_TOKEN, now_s)

    def refused(self, pod: PodId) -> None:
        """A pod has refused the request. Another candidate is tried, as after a body that the router changed, or the
        client receives the refusal."""
        tracker, now_s = self.tracker, self.core.clock.now_s()
        assert self.context.candidate is not None
        plan = self.context.candidate.plan
        if (isinstance(plan, Split) or plan.pull) and not tracker.is_last:
            self.resume(HandoffFailed(f"pod {pod}: status {_REFUSED}"))
            return
        tracker.head(pod, _REFUSED, [], now_s)
        tracker.rest(now_s)
        tracker.complete(now_s)
        self.outcome.refused = "does not fit"
        self.resume()

    def moved(self, pod: PodId, rest: TrafficRequest) -> Candidate | None:
        """The stream leaves its pod. Returns the candidate that is booked for the `rest`; None where there is none."""
        now_s, context = self.core.clock.now_s(), self.context
        self._streams[pod] -= rest is not self.request
        self.tracker.release(now_s)
        candidate = other_pod(context, self.core.decisions.decide_again(context, now_s)[1], context.request.endpoint)
        if candidate is not None:
            self.request = rest
            context.answered_tokens = rest.prompt_tokens - self.session.requests[self.number].prompt_tokens
            self.tracker.begin(candidate, now_s)
        return candidate

    def complete(self, pod: PodId, cached_tokens: int) -> None:
        self._streams[pod] -= 1
        now_s, request = self.core.clock.now_s(), self.session.requests[self.number]
        self.tracker.piece(_END % (request.prompt_tokens, request.output_tokens, cached_tokens), now_s)
        self.tracker.rest(now_s)
        self.tracker.complete(now_s)
        self.resume()
