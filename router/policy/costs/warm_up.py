"""How much more does a queue count on a pod that has just started or recovered?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from router.policy.term import CostTerm, Input, Placement, Side


class WarmUpTerm(CostTerm):
    """Work queued on a pod that has just become ready counts more at first, then less and less:

        warm_up = weight * (1 - age / slow_start_s) * queued prefill        0 from slow_start_s on

    A process that has just started compiles, captures and allocates on its first requests; one that was ejected may
    still fail. Both are idle and would get all requests at once. The first request to such a pod finds no queue and
    costs nothing more; for the next ones the queue counts 1 + `weight` times at age 0. Source: slow start as in
    Envoy's and NGINX's load balancing.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 1.0
    slow_start_s: PositiveFloat = 10.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if not placements:
            return []
        slow_start_s, now_s = self.slow_start_s, placements[0].request.now_s
        return [
            0.0
            if (since_s := at.pod.ready_since_s) is None or now_s - since_s >= slow_start_s
            else self._slowed_ms(at, now_s - since_s)
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        since_s = at.pod.ready_since_s
        if since_s is not None and at.request.now_s - since_s < self.slow_start_s:
            yield Input("age", "s", max(at.request.now_s - since_s, 0.0))
            yield Input("queued prefill", "ms", at.inflight.queue_ms(at.request.now_s))

    def _slowed_ms(self, at: Placement, age_s: float) -> float:
        share = 1.0 - max(age_s, 0.0) / self.slow_start_s
        return self.weight * share * at.inflight.queue_ms(at.request.now_s)
