"""What does a pod cost that has only just begun, or begun again, to serve?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from router.policy.term import CostTerm, Placement, Side


class WarmUpTerm(CostTerm):
    """What waits there counts for more at first, and ever less so:

        warm_up = weight * (1 - age_s / slow_start_s) * queue_ms        until slow_start_s; then 0

    with queue_ms the prefill that we have there. A process that has just come up compiles, captures and allocates on
    its first requests; one that was ejected has yet to show that it is well. Both look idle, and would get everything
    at once. The first request comes to it as to any other; at its first moment each further one finds a queue that is
    1 + `weight` times as long. Source: slow start as in Envoy's and NGINX's load balancing.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 1.0
    slow_start_s: PositiveFloat = 10.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        slow_start_s = self.slow_start_s
        return [
            0.0
            if (since_s := at.pod.ready_since_s) is None or at.now_s - since_s >= slow_start_s
            else self._slowed_ms(at, at.now_s - since_s)
            for at in placements
        ]

    def _slowed_ms(self, at: Placement, age_s: float) -> float:
        share = 1.0 - max(age_s, 0.0) / self.slow_start_s
        return self.weight * share * at.inflight.queue_ms(at.now_s)
