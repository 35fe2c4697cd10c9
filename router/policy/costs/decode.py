"""How much slower does everything get where many requests are already decoding?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Placement, Side


class DecodeTerm(CostTerm):
    """Slow-down of this request's own decoding by its neighbours, over its expected output:

        decode = weight * output_tokens * (d1 * running + d2 * context tokens of our requests there)

    `running` is what the engine last said or what we have sent there, whichever is more: a scrape lags, a ledger
    does not see other routers. `weight` is how many milliseconds of time to first token one millisecond of decoding
    is worth. Source of d1, d2: reference/cost-model.md, simulator.md 5.2.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.25

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        weight, costs_ms = self.weight, []
        for at in placements:
            inflight, speed, running = at.inflight, at.pod.speed, at.load.running
            decoding = inflight.requests - inflight.prefill_requests
            running = decoding if decoding > running else running
            step_ms = speed.d1_ms_per_request * running + speed.d2_ms_per_context_token * inflight.context_tokens
            costs_ms.append(weight * at.output_tokens * step_ms)
        return costs_ms
