"""What is it worth to place a prefix on one more pod, when everybody will want it there?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from router.policy.term import CostTerm, Placement, Side


class HotPrefixCreditTerm(CostTerm):
    """Credit for computing a prefix that the traffic shares anyway:

        hot_prefix_credit = -credit * (T_prefill(n, cached) - T_prefill(n, max(cached, shared)))

    A prefix that carries more than one pod's fair share of the traffic must live on several pods. Its first
    computation on another pod is then paid once and used by all that follow, so that this request should not be
    kept away by it. Without this term an idle fleet sends everything behind one shared system prompt to one pod.
    Negative by design: it takes back part of `prefill`, never more.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    credit: Annotated[float, Field(ge=0, le=1)] = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        credit = self.credit
        return [
            -credit * at.pod.speed.compute_ms(at.cached_tokens, at.shared_tokens)
            if at.shared_tokens > at.cached_tokens
            else 0.0
            for at in placements
        ]
