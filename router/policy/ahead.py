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
    work, began_s = at.inflight, at.step.at_s
    decodes = work.requests > work.prefill_requests
    if not work.head_ms:  # of other routers' prompts it is not known here when they began
        return work.prefill_ms + (_rest_ms(at, began_s, at.fixed_ms) if decodes else 0.0)
    if not decodes or began_s == -inf:
        began_s, inside_ms = work.head_since_s, work.head_ms
    else:
        inside_ms = min(at.step.prefill_ms, work.prefill_ms, _most_ms(at)) if began_s >= work.head_since_s else 0.0
    return _rest_ms(at, began_s, at.fixed_ms + inside_ms) + work.prefill_ms - inside_ms


def _most_ms(at: Placement) -> float:
    """What time can pass on: the first prompt, or what fits into a step. The others may have to wait for room."""
    return max(at.inflight.head_ms, STEP_BUDGET_TOKENS * at.pod.speed.c1_ms_per_token)


def _rest_ms(at: Placement, began_s: float, step_ms: float) -> float:
    """Of a step that takes so long; half of it where nobody saw it begin."""
    return max(0.0, step_ms - (at.now_s - began_s) * 1000) if began_s > -inf else step_ms / 2
