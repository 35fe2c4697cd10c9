"""What is the KV worth that this request evicts from the pod?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side


class EvictionTerm(CostTerm):
    """A full cache evicts as many tokens as a request adds, and a part of them would have been requested again:

        eviction = reuse * c1 * (n - max(held here, shared))

    `reuse` is the mean number of requests that would have used an evicted token before its regular eviction.
    Copies that a pull brings count as well: a second copy of a prefix takes the space of another prefix. The prefix
    that all traffic shares counts as held: every pod needs space for it once, whichever request brings it.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    reuse: NonNegativeFloat = 0.25

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        reuse, costs_ms = self.reuse, []
        for at in placements:
            request, held_tokens = at.request, at.own_tokens
            if held_tokens < request.shared_tokens:
                held_tokens = request.shared_tokens
            costs_ms.append(reuse * at.pod.speed.c1_ms_per_token * (request.prompt_tokens - held_tokens))
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield Input("n", "prompt tokens", at.request.prompt_tokens)
        yield Input("held here", "tokens", at.own_tokens)
        yield Input("shared", "tokens", at.request.shared_tokens)
        yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
