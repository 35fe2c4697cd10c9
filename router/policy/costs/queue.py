"""How long until this pod starts on a new prompt?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar

from pydantic import NonNegativeInt

from router.policy.term import CostTerm, Input, Placement, Side, compute_inputs

STEP_BUDGET_TOKENS = 8192
"""Maximum tokens that an engine computes in one step: vLLM's default on large GPUs."""


class QueueTerm(CostTerm):
    """Work ahead of this request, in milliseconds:

        queue = max(0, F + W_in - time since step began) + W_behind
              + max(0, waiting at engine - our prompts then) * (c0 + c1 f + c2 f^2)        f = foreign_request_tokens

    Engines compute in steps. The current step takes its fixed part F and the prompts in it, W_in; prompts that arrive
    meanwhile (W_behind, and this request) are computed in the next step. Prompts count without their expected cache
    hits. The first part is 0 if no request of ours is on the pod. The last part counts requests of another origin: the
    waiting requests of the last scrape without those that were ours at that time.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True
    foreign_request_tokens: NonNegativeInt = 1024

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [
            work_ahead_ms(at) + self._foreign_ms(at) if at.load.waiting > at.load.our_prompts else work_ahead_ms(at)
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        speed, load = at.pod.speed, at.load
        yield from work_ahead_inputs(at)
        yield Input("waiting at engine", "requests", load.waiting)
        yield Input("our prompts then", "requests", load.our_prompts)
        if load.foreign_waiting:
            yield Input("c0", "ms", speed.c0_ms)
            yield from compute_inputs(at)

    def _foreign_ms(self, at: Placement) -> float:
        return at.load.foreign_waiting * at.pod.speed.prefill_ms(self.foreign_request_tokens)


def work_ahead_ms(at: Placement) -> float:
    """Milliseconds until the next step can begin and our earlier prompts in it are computed."""
    work, began_s, inside_ms = at.inflight, at.step.at_s, 0.0
    # As `current_step`, without a call: this runs several times for each pod of a decision.
    if head_ms := work.head_ms:
        head_since_s = work.head_since_s
        if began_s == -inf or work.requests == work.prefill_requests:
            began_s, inside_ms = head_since_s, head_ms
        elif began_s >= head_since_s:
            inside_ms = min(at.step.prefill_ms, work.prefill_ms, _max_in_step_ms(at))
    elif work.requests == work.prefill_requests:
        return work.prefill_ms
    rest_ms = at.fixed_ms + inside_ms
    if began_s == -inf:
        return rest_ms / 2 + work.prefill_ms - inside_ms
    rest_ms -= (at.request.now_s - began_s) * 1000
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
    return began_s, min(at.step.prefill_ms, work.prefill_ms, _max_in_step_ms(at))


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


def _max_in_step_ms(at: Placement) -> float:
    """The first prompt, or what fits into one step: the other prompts may have to wait for KV space."""
    return max(at.inflight.head_ms, STEP_BUDGET_TOKENS * at.pod.speed.c1_ms_per_token)
