"""What is remembered of one request while it is served?

Filled in phase by phase, settled into metrics and an outcome at its end. This file counts nothing.
"""

from __future__ import annotations

import time

import msgspec
from msgspec.structs import replace

from router.decision import Candidate, Direct, RouteDecision, Split
from router.engines.engine_catalog import DIALECTS
from router.observe.phase import Phases
from router.observe.receipts import Failure, Outcome, RecordedDecision
from router.observe.slices import Slice
from router.policy.decide import BYTES_PER_TOKEN, expected_ttft_ms
from router.policy.spec import Policy
from router.proxy.answer import AnswerReader
from router.proxy.downstream import Inbound
from router.types import InferenceRequest, PodId, PromptPrefix


class RequestContext(msgspec.Struct, eq=False):
    """One request, from the door to the last byte."""

    request: InferenceRequest
    inbound: Inbound
    phases: Phases = msgspec.field(default_factory=Phases)
    prompt: PromptPrefix | None = None
    workload: str = ""
    """Its class; empty until it is decided."""
    policy: Policy | None = None
    decision: RouteDecision | None = None
    kept: RecordedDecision | None = None
    candidate: Candidate | None = None
    reader: AnswerReader = msgspec.field(default_factory=AnswerReader)
    status: int = 0
    first_token_s: float | None = None
    handed_over_cached_tokens: int | None = None
    """What the prefill pod of a split had not to compute, by its own account."""
    tries: int = 0
    failed_pods: tuple[PodId, ...] = ()
    failures: tuple[Failure, ...] = ()
    result: str = "error"
    _body_bytes: int = 0
    """Of what was let go."""
    _refusals: dict[str, str] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Estimated from the body where the prompt could not be read."""
        if self.prompt:
            return self.prompt.token_count
        return (self._body_bytes or len(self.request.body)) // BYTES_PER_TOKEN

    def let_go(self) -> None:
        """The answer has begun, so that no other pod will be asked: for as long as it takes, only the length and the
        hashes of the prompt are kept, a twentieth of the whole."""
        self._body_bytes = self._body_bytes or len(self.request.body)
        self.request = replace(self.request, body=b"", prompt={})
        if self.prompt is not None:
            self.prompt = replace(self.prompt, tokens=range(self.prompt.token_count))

    @property
    def prefill_pod(self) -> PodId:
        """The pod of a split that computes the prompt; "" where the answering one does."""
        plan = self.candidate.plan if self.candidate else None
        return plan.prefill.id if isinstance(plan, Split) else ""

    @property
    def cached_tokens(self) -> int | None:
        """What the pod that computed the prompt found in its cache; None where it did not say."""
        split = self.candidate is not None and isinstance(self.candidate.plan, Split)
        return self.handed_over_cached_tokens if split else self.reader.cached_tokens

    def refused_by(self, dialect: str) -> str:
        """Why a dialect cannot split this request; empty where it can. Its body is read once for each dialect."""
        if self._refusals is None:
            self._refusals = {}
        if dialect not in self._refusals:
            self._refusals[dialect] = DIALECTS[dialect].refuses(self.request.endpoint, self.request.body)
        return self._refusals[dialect]


def slice_of(context: RequestContext, policy: Policy, ended: Outcome) -> Slice:
    """The context by what it was and who decided it, `ended` as its outcome says."""
    return Slice(
        context.workload,
        policy.name,
        context.request.tenant,
        ended.result,
        context.prompt_tokens,
        ended.cached_tokens,
        context.first_token_s if context.request.stream else None,
        policy.slo_ttft_ms,
    )


def timed(context: RequestContext) -> tuple[PodId, float, float] | None:
    """(pod, expected, actual milliseconds) of the first token, where one pod alone answers for the difference."""
    if not context.request.stream or context.tries != 1 or context.prompt is None:
        return None
    first_token_s, candidate = context.first_token_s, context.candidate
    if first_token_s is None or candidate is None or not isinstance(candidate.plan, Direct) or candidate.plan.pull:
        return None
    return candidate.pod.id, expected_ttft_ms(candidate.cost), first_token_s * 1000


def outcome_of(context: RequestContext) -> Outcome:
    """What came of it, in numbers: as it stands, but that the phase under way is added when it ends."""
    request, prompt, reader, first_token_s = context.request, context.prompt, context.reader, context.first_token_s
    elapsed_s = context.phases.elapsed_s()
    return Outcome(
        id=request.id,
        at_s=time.time() - elapsed_s,
        model=request.model,
        endpoint=request.endpoint,
        result=context.result,
        prompt_tokens=len(prompt.tokens) if prompt else reader.prompt_tokens or 0,
        output_tokens=reader.output_tokens,
        cached_tokens=context.cached_tokens,
        ttft_ms=first_token_s * 1000 if request.stream and first_token_s is not None else None,
        e2e_ms=elapsed_s * 1000,
        served=context.candidate,
        failures=context.failures,
        phases_s=context.phases.taken_s,
    )
