"""What is the KV worth that this request pushes out of the pod's cache?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Placement, Side


class EvictionTerm(CostTerm):
    """A full cache loses as many tokens as a request brings, and some of them somebody would have come back for:

        eviction = reuse * c1 * (n - what the pod holds of it)

    `reuse` is how often a token at the end of the cache's line would have been asked for before it had left anyway.
    Copies that a pull brings count as well: a second copy of a prefix is room for one prefix less. What all traffic
    shares counts as held: every pod must find room for it once, whoever comes first.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    reuse: NonNegativeFloat = 0.25

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        reuse, costs_ms = self.reuse, []
        for at in placements:
            own_tokens, shared_tokens = at.own_tokens, at.shared_tokens
            held_tokens = own_tokens if own_tokens > shared_tokens else shared_tokens
            costs_ms.append(reuse * at.pod.speed.c1_ms_per_token * (at.prompt_tokens - held_tokens))
        return costs_ms
