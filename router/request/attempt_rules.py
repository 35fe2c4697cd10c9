"""What the attempts of all requests have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from router.admission.fair_bound import FairBound, body_memory
from router.config.index_schema import Index
from router.decision import Plan, RouteDecision, Split
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Order
from router.errors import MalformedRequest, NoReadyPod, RouterError
from router.policy.retry import RetryBudget
from router.request.context import RequestContext
from router.request.continuation.answer_words import WordsOf
from router.request.continuation.later_pods import StepTimes
from router.request.hosted import Hosted
from router.request.inbound import HeaderList
from router.types import Pod, PodId

SAMPLED_STREAMS = 16
"""The time between tokens is measured in every stream of this number."""

FactsLookup: TypeAlias = Callable[[Pod, str], Mapping[str, Any] | None]
"""Returns `Pair.facts` for (prefill pod, dialect); None while they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationRules:
    """`silence_s`: how long a pod that is not ready may send nothing at least; longer where its steps are.
    `only_proven`: streams go on only between pods that have shown it in a test."""

    words_of: WordsOf
    silence_s: float
    only_proven: bool = False
    steps: StepTimes = field(default_factory=StepTimes)

    def may_continue(self, decision: RouteDecision | None) -> bool:
        """Whether a stream may go on, on one of the pods of this decision."""
        return not self.only_proven or (decision is not None and any(one.pod.continues for one in decision.candidates))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRules:
    """`retries`: candidates after the first, where the policy does not say. `route_headers`: responses name the pod.
    `hands_over`: a gateway sends the request, and once it has the pod alone may try others; it sends each body once.
    `runs_prefill`: the router sends the prefill requests of splits nevertheless. `memory`: for bodies of requests and
    what is held of responses. `index`: how long predictions count, and for how many blocks of a pod without KV events;
    `publishes_events`: whether the index receives a pod's events. `suspect`: a pod has said that it lacks something.
    `hosted`: providers by name."""

    retries: int
    route_headers: bool
    budget: RetryBudget
    index: Index
    publishes_events: Callable[[PodId], bool]
    handoff_facts: FactsLookup
    suspect: Callable[[Pod, str], object] = lambda _pod, _need: None
    memory: FairBound = field(default_factory=body_memory)
    hosted: Hosted = field(default_factory=dict)
    hands_over: bool = False
    runs_prefill: bool = False
    continuation: ContinuationRules | None = None
    """None: broken streams end."""
    _streams: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def is_sampled(self) -> bool:
        """Whether the gaps between the tokens of the next stream are measured."""
        return next(self._streams) % SAMPLED_STREAMS == 0

    def added_headers(self, context: RequestContext) -> HeaderList:
        """The id and limits of a request; with `route_headers`, also where it was sent and what was expected there."""
        headers = [(b"x-request-id", context.request.id.encode()), *context.limit_headers]
        if context.head.trace is not None:
            headers.append(context.head.trace.context())
        if not self.route_headers or context.decision is None or context.candidate is None:
            return headers
        plan = context.candidate.plan
        headers += [
            (b"x-warmroute-pod", plan.pod.id.encode()),
            (b"x-warmroute-policy", context.decision.policy.encode()),
            (b"x-warmroute-cached-tokens", b"%d" % context.candidate.cached_tokens),
        ]
        if context.request.name:
            headers.append((b"x-warmroute-model", (context.request.adapter or context.request.model).encode()))
        if context.request.fallback:
            headers.append((b"x-warmroute-fallback", context.request.fallback.encode()))
        if isinstance(plan, Split):
            headers.append((b"x-warmroute-prefill-pod", plan.prefill.id.encode()))
        if reason := context.unmatched:
            headers.append((b"x-warmroute-match", b"none; reason=" + reason.encode()))
        return headers

    def unusable_reason(self, context: RequestContext, plan: Plan) -> RouterError | None:
        """Why this plan cannot serve the request; None if it can."""
        if not isinstance(plan, Split):
            return NoReadyPod(f"Pod {plan.pod.id} serves no request on its own.") if not plan.pod.serves_alone else None
        if why := context.split_refusal():
            return MalformedRequest(why)
        if self.handoff_facts(plan.prefill, plan.prefill.handoff) is None:
            return NoReadyPod(f"Handoff facts of pod {plan.prefill.id} are not known yet.")
        if self.hands_over and self.runs_prefill and DIALECTS[plan.prefill.handoff].order is Order.TOGETHER:
            why = "a gateway cannot send both at once (picker.prefill)"
            return NoReadyPod(f"Handoffs of pod {plan.prefill.id} need a prefill and a decode request: {why}.")
        return None
