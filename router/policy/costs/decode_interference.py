"""How much does this prompt delay the requests that already decode on the pod?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side, compute_inputs, prompt_inputs


class DecodeInterferenceTerm(CostTerm):
    """While a prompt is computed, every request that decodes on the pod waits for the same time:

        decode_interference = weight * requests decoding * (c1 (n - p) + c2 (n^2 - p^2))

    `weight` is the milliseconds of this request's time to first token that one millisecond of another request is worth.
    The term favours prefill pods, where no request decodes. Source: docs/cost-model.md#a-step.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.02

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        weight = self.weight
        return [weight * at.decoding_requests * at.compute_ms for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from prompt_inputs(at)
        yield Input("requests decoding", "requests", at.decoding_requests)
        yield from compute_inputs(at)
