"""What is it worth to place a prefix that all traffic shares on one more pod?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from router.policy.term import CostTerm, Input, Placement, Side, compute_inputs


class HotPrefixCreditTerm(CostTerm):
    """Credit for computing a prefix that the traffic shares anyway:

        hot_prefix_credit = -credit * (c1 (shared - p) + c2 (shared^2 - p^2))        0 if shared is at most p

    A prefix in more than one pod's fair share of the traffic must be cached on several pods. Its first computation on
    another pod is paid once and used by all later requests, so this request should not be kept away by it. Without this
    term an idle fleet sends every request with the same system prompt to one pod. Negative by design: it takes back
    part of `prefill`, never more.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    credit: Annotated[float, Field(ge=0, le=1)] = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        shared_tokens = placements[0].request.shared_tokens if placements else 0
        if not shared_tokens:
            return [0.0] * len(placements)
        credit = self.credit
        return [
            -credit * at.pod.speed.compute_ms(at.cached_tokens, shared_tokens)
            if shared_tokens > at.cached_tokens
            else 0.0
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield Input("p", "cached tokens", at.cached_tokens)
        yield Input("shared", "tokens", at.request.shared_tokens)
        yield from compute_inputs(at)
