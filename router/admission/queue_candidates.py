"""What the queue reads of the candidates of a decision."""

from __future__ import annotations

from collections.abc import Mapping

from router.admission.admission_queue import QueueCandidate
from router.decision import Candidate, Split
from router.types import PRIOR_OUTPUT_TOKENS, InFlight, Pod, PodId, Role

FULL_SHARE = 0.9
"""The share of a pod's KV for prompts; the rest is for answers."""
_IDLE = InFlight()


def queue_candidate(
    candidate: Candidate, inflight: Mapping[PodId, InFlight], now_s: float, prompt_tokens: int, ttft_ms: float
) -> QueueCandidate:
    """The decode step counts all requests on the pod, since those without a first token will decode when this prompt is
    computed (Mooncake, 2407.00079), but not this one: in an overload, a few percent would refuse most long prompts.
    What is handed over waits for the prompts that the decode pod computes itself, and for room for its KV."""
    plan, answering = candidate.plan, candidate.plan.pod
    computing = plan.prefill if isinstance(plan, Split) else answering
    there = inflight.get(answering.id, _IDLE)
    ahead = inflight.get(computing.id, _IDLE)
    if answering is not computing and there.prefill_requests:
        ttft_ms = max(ttft_ms, there.queue_ms(now_s))
    return QueueCandidate(
        pod=computing.id,
        cost_ms=candidate.cost.total_ms,
        ttft_ms=ttft_ms,
        queue_ms=ahead.queue_ms(now_s) if ahead.prefill_requests else 0.0,
        prefill_ms=computing.speed.compute_ms(candidate.cached_tokens, prompt_tokens),
        step_ms=answering.speed.step_ms(there.requests, there.context_tokens),
        decodes=computing.role is not Role.PREFILL,
        decode_pod="" if answering is computing else answering.id,
        room_ms=max(_until_room_ms(answering, there, prompt_tokens) - ttft_ms, 0.0),
    )


def _until_room_ms(pod: Pod, there: InFlight, prompt_tokens: int) -> float:
    """The time until a decode pod has room for the KV of one prompt more, if all that are on their way to it arrive
    before: requests leave it evenly over the time that one takes, and then all have left."""
    if pod.role is not Role.DECODE or not pod.capacity_tokens or not there.context_tokens:
        return 0.0
    used_tokens = there.context_tokens
    short_tokens = used_tokens + prompt_tokens - pod.capacity_tokens * FULL_SHARE
    if short_tokens <= 0:
        return 0.0
    return min(short_tokens / used_tokens, 1.0) * PRIOR_OUTPUT_TOKENS * pod.speed.step_ms(there.requests, used_tokens)
