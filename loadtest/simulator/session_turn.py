"""One request of a session in the core of a router: the front of the simulation, which moves no bytes."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.simulator.outcome import RequestOutcome
from loadtest.simulator.router_view import RouterView
from loadtest.simulator.traffic import Session, TrafficRequest
from router.admission.tenant import Tenant
from router.decision import Candidate, Split
from router.errors import HandoffFailed, RouterError
from router.phases import Phases
from router.request.context import RequestContext
from router.request.continuation.later_pods import other_pod
from router.request.inbound import EVENT_STREAM, Head
from router.request.preparation_steps import Ticket, Tokens
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


@dataclass(eq=False)
class SessionTurn:
    """Drives one request through the core that its router has now; a restart changes nothing for it."""

    router: RouterView
    context: RequestContext
    session: Session
    number: int
    generation: Generation
    outcome: RequestOutcome

    def __post_init__(self) -> None:
        self.core, self._streams = self.router.core, self.router.streams
        self.request: TrafficRequest = self.session.requests[self.number]
        """What the pod is sent: once the stream has moved, with the answer so far."""
        self._steps = self.core.requests.prepare(self.context)
        self._tracker = self.core.requests.tracker(self.context)
        self.core.requests.endings.begin()

    def prepare(self, error: RouterError | None = None) -> Ticket | None:
        """The ticket that the request waits for; None: it may be attempted. To be called again when the ticket is
        settled, with its error. Raises `RouterError`."""
        try:
            step = self._steps.throw(error) if error else next(self._steps)
            while isinstance(step, Tokens):
                hashes = self.request.prompt_hashes
                step = self._steps.send(PromptPrefix(self.generation, range(self.request.prompt_tokens), hashes))
        except StopIteration:
            return None
        assert isinstance(step, Ticket)
        return step

    def attempt(self) -> Candidate:
        """Book the first candidate. Raises `RouterError`."""
        now_s = self.core.clock.now_s()
        candidate = self._tracker.first(now_s)
        self._tracker.begin(candidate, now_s)
        return candidate

    def awaits_handoff(self, pod: PodId) -> bool:
        """Whether another pod decodes after that pod's prefill. The prefill pod sends an answer of one token itself."""
        return self.request.output_tokens > 1 and pod == self.context.prefill_pod

    def computed(self, cached_tokens: int) -> None:
        """The prefill pod of a split has responded."""
        self.context.handed_over_cached_tokens = cached_tokens
        self._tracker.handed_over(self.core.clock.now_s())

    def first_token(self, pod: PodId) -> None:
        self._streams[pod] += 1
        now_s = self.core.clock.now_s()
        self._tracker.head(pod, 200, _EVENTS, now_s)
        self._tracker.piece(_FIRST_TOKEN, now_s)

    def refused(self, pod: PodId) -> Candidate | None:
        """A pod has refused the request. Returns the candidate that is booked instead, as after a body that the router
        changed; None where the client receives the refusal."""
        tracker, now_s = self._tracker, self.core.clock.now_s()
        assert self.context.candidate is not None
        plan = self.context.candidate.plan
        if (isinstance(plan, Split) or plan.pull) and not tracker.is_last:
            candidate = tracker.failed(HandoffFailed(f"pod {pod}: status {_REFUSED}"), now_s)
            assert candidate is not None
            tracker.begin(candidate, now_s)
            return candidate
        tracker.head(pod, _REFUSED, [], now_s)
        tracker.rest(now_s)
        tracker.complete(now_s)
        self.end()
        return None

    def moved(self, pod: PodId, rest: TrafficRequest) -> Candidate | None:
        """The stream leaves its pod. Returns the candidate that is booked for the `rest`; None where there is none."""
        now_s, context = self.core.clock.now_s(), self.context
        self._streams[pod] -= rest is not self.request
        self._tracker.release(now_s)
        candidate = other_pod(context, self.core.decisions.decide_again(context, now_s)[1], context.request.endpoint)
        if candidate is not None:
            self.request = rest
            context.answered_tokens = rest.prompt_tokens - self.session.requests[self.number].prompt_tokens
            self._tracker.begin(candidate, now_s)
        return candidate

    def complete(self, pod: PodId, cached_tokens: int) -> None:
        self._streams[pod] -= 1
        now_s, request = self.core.clock.now_s(), self.session.requests[self.number]
        self._tracker.piece(_END % (request.prompt_tokens, request.output_tokens, cached_tokens), now_s)
        self._tracker.rest(now_s)
        self._tracker.complete(now_s)
        self.end()

    def end(self, error: RouterError | None = None) -> None:
        """Settle the request. `error`: why the router refuses it."""
        endings = self.core.requests.endings
        if error is not None:
            endings.failed(self.context, error, has_answered=False)
        self._tracker.end(self.core.clock.now_s())
        endings.end(self.context)
