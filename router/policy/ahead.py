"""What is a pod busy with until it can begin on a new prompt?

Engines compute in steps, and a prompt that arrives waits for the end of the one under way. Its end can be foreseen: it
began when tokens last came out, and what is in it is known. Pure arithmetic; this file prices nothing that comes after.
"""

from __future__ import annotations

from math import inf

from router.policy.term import Placement

STEP_BUDGET_TOKENS = 8192
"""Tokens that an engine computes in one step at the most: vLLM's default on large GPUs."""


def ahead_ms(at: Placement) -> float:
    """Until the next step can begin and our prompts that are before this one in it are computed, in milliseconds."""
    under_way, waiting_ms = step_under_way(at), at.inflight.prefill_ms
    if under_way is None:
        return waiting_ms
    began_s, inside_ms = under_way
    rest_ms = at.fixed_ms + inside_ms
    if began_s == -inf:
        return rest_ms / 2 + waiting_ms - inside_ms
    rest_ms -= (at.now_s - began_s) * 1000
    return (rest_ms if rest_ms > 0 else 0.0) + waiting_ms - inside_ms


def step_under_way(at: Placement) -> tuple[float, float] | None:
    """When it began, and milliseconds of our prompts in it; None where nothing of ours is under way.

    Minus infinity where nobody saw it begin. A step of other routers' prompts is not known here."""
    work, began_s = at.inflight, at.step.at_s
    decodes = work.requests > work.prefill_requests
    if not work.head_ms:
        return (began_s, 0.0) if decodes else None
    if not decodes or began_s == -inf:
        return work.head_since_s, work.head_ms
    if began_s < work.head_since_s:
        return began_s, 0.0
    return began_s, min(at.step.prefill_ms, work.prefill_ms, _most_ms(at))


def _most_ms(at: Placement) -> float:
    """What time can pass on: the first prompt, or what fits into a step. The others may have to wait for room."""
    return max(at.inflight.head_ms, STEP_BUDGET_TOKENS * at.pod.speed.c1_ms_per_token)
