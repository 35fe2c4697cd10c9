"""How long until a pod can start on a new prompt?

The planner computes it once for each placement; several cost terms read it. `QueueTerm` has the formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from router.policy.term import Input, Placement
from router.types import InFlight, PodSpeed, StepBegan

STEP_BUDGET_TOKENS = 8192
"""Maximum tokens that an engine computes in one step: vLLM's default on large GPUs."""


def work_ahead_ms(work: InFlight, step: StepBegan, speed: PodSpeed, fixed_ms: float, now_s: float) -> float:
    """Milliseconds until the next step can begin and our earlier prompts in it are computed."""
    began_s, inside_ms = step.at_s, 0.0
    # As `current_step`, without a call: this runs for each pod of a decision.
    if head_ms := work.head_ms:
        head_since_s = work.head_since_s
        if began_s == -inf or work.requests == work.prefill_requests:
            began_s, inside_ms = head_since_s, head_ms
        elif began_s >= head_since_s:
            inside_ms = min(step.prefill_ms, work.prefill_ms, _max_in_step_ms(work, speed))
    elif work.requests == work.prefill_requests:
        return work.prefill_ms
    rest_ms = fixed_ms + inside_ms
    if began_s == -inf:
        return rest_ms / 2 + work.prefill_ms - inside_ms
    rest_ms -= (now_s - began_s) * 1000
    behind_ms = work.prefill_ms - inside_ms
    return rest_ms + behind_ms if rest_ms > 0 else behind_ms


def current_step(at: Placement) -> tuple[float, float] | None:
    """When the current step began, and the milliseconds of our prompts in it; None if nothing of ours is running.

    Minus infinity if its begin was not observed. A step with prompts of other routers only is not visible here."""
    work, began_s = at.inflight, at.step.at_s
    decodes = work.decode_requests > 0
    if not work.head_ms:
        return (began_s, 0.0) if decodes else None
    if not decodes or began_s == -inf:
        return work.head_since_s, work.head_ms
    if began_s < work.head_since_s:
        return began_s, 0.0
    return began_s, min(at.step.prefill_ms, work.prefill_ms, _max_in_step_ms(work, at.pod.speed))


def work_ahead_inputs(at: Placement) -> Iterator[Input]:
    """What `work_ahead_ms` reads. Half of a step whose begin was not observed counts as over."""
    current = current_step(at)
    began_s, inside_ms = current or (0.0, 0.0)
    if current:
        elapsed_ms = (at.request.now_s - began_s) * 1000 if began_s > -inf else (at.fixed_ms + inside_ms) / 2
        yield Input("F", "ms", at.fixed_ms)
        yield Input("W_in", "ms", inside_ms)
        yield Input("time since step began", "ms", elapsed_ms)
    yield Input("W_behind", "ms", at.inflight.prefill_ms - inside_ms)


def _max_in_step_ms(work: InFlight, speed: PodSpeed) -> float:
    """The first prompt, or what fits into one step: the other prompts may have to wait for KV space."""
    return max(work.head_ms, STEP_BUDGET_TOKENS * speed.c1_ms_per_token)
