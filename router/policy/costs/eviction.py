"""What is the KV worth that this request evicts from the pod?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.costs.congestion import congestion_inputs, prompts_reached_per_ms
from router.policy.term import CostTerm, Input, Placement, Side
from router.types import Congestion

MAX_DELAY = 100.0
"""Maximum delay of other prompts that counts, in ms for each ms of compute."""


class EvictionTerm(CostTerm):
    """A full cache evicts as many tokens as a request adds, and a part of them would have been requested again:

        D = min(K * backlog, 100)        K = prompts / (1000 * max(1 - busy, 0.05))
        eviction = (reuse + learnt * R) * (1 + congestion * D) * c1 * (n - max(held here, shared))

    `reuse` is the mean number of requests that would have used an evicted token before its regular eviction. R, the
    `learnt reuse`, is that number as the router measures it, per model, from requests for blocks that have just left
    the caches. It does not depend on this request: the oldest blocks are evicted, of any class of work. Computing them
    again takes time, and delays the prompts that come after by D ms for each ms: `backlog` is the prefill that a pod
    has to compute now, the mean of the pods of this model; K is explained in `congestion`. In an idle fleet D is 0,
    near saturation 10 and more.
    Copies that a pull brings count as well: a second copy of a prefix takes the space of another prefix. The prefix
    that all traffic shares counts as held: every pod needs space for it once, whichever request brings it.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    reuse: NonNegativeFloat = 0.25
    learnt: NonNegativeFloat = 0.0
    congestion: NonNegativeFloat = 0.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if not placements:
            return []
        request, costs_ms = placements[0].request, []
        n, shared_tokens = request.prompt_tokens, request.shared_tokens
        reuse = self.reuse + self.learnt * request.scene.learnt_reuse
        if self.congestion:
            reuse *= 1 + self.congestion * self._delay(request.scene.congestion)
        for at in placements:
            held_tokens = at.own_tokens
            if held_tokens < shared_tokens:
                held_tokens = shared_tokens
            costs_ms.append(reuse * at.pod.speed.c1_ms_per_token * (n - held_tokens))
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield Input("n", "prompt tokens", at.request.prompt_tokens)
        yield Input("held here", "tokens", at.own_tokens)
        yield Input("shared", "tokens", at.request.shared_tokens)
        yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
        if self.learnt:
            yield Input("learnt reuse", "requests", at.request.scene.learnt_reuse)
        if self.congestion:
            yield from congestion_inputs(at)

    def _delay(self, congestion: Congestion) -> float:
        """Delay of other prompts, in ms for each ms of compute."""
        return min(prompts_reached_per_ms(congestion) * congestion.backlog_ms, MAX_DELAY)
