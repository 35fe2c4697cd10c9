"""How much slower is decoding on a pod where many requests already decode?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side, decode_inputs


class DecodeTerm(CostTerm):
    """Slow-down of this request's own decoding by the other requests on the pod, over its expected output:

        decode = weight * expected output * (d1 * requests decoding + d2 * context in flight)

    `requests decoding` is the last scrape of the engine or our ledger, whichever is more: a scrape lags, a ledger does
    not include other routers. `context in flight` counts the tokens of our requests. `weight` is the milliseconds of
    time to first token that one millisecond of decoding is worth. Source of d1, d2: reference/cost-model.md,
    simulator.md 5.2.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.25

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if not placements:
            return []
        weighted_tokens, costs_ms = self.weight * placements[0].request.output_tokens, []
        for at in placements:
            speed = at.pod.speed
            step_ms = speed.d1_ms_per_request * at.decoding_requests
            step_ms += speed.d2_ms_per_context_token * at.inflight.context_tokens
            costs_ms.append(weighted_tokens * step_ms)
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from decode_inputs(at)
        yield Input("context in flight", "tokens", at.inflight.context_tokens)
