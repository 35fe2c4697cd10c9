"""What does this prompt cost those who are already decoding on the pod?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Placement, Side


class DecodeInterferenceTerm(CostTerm):
    """While a prompt is computed, everybody who decodes on the pod waits for the same time in all:

        decode_interference = weight * requests decoding there * (T_prefill(n, p) - c0)

    `weight` is how many milliseconds of this request's first token one millisecond of somebody else's is worth. It is
    what speaks for a prefill pod, where nobody decodes. Source: reference/cost-model.md 4.1 (a step's time).
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.02

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        weight = self.weight
        return [
            weight * _decoding(at) * at.pod.speed.compute_ms(at.cached_tokens, at.prompt_tokens) for at in placements
        ]


def _decoding(at: Placement) -> int:
    return max(at.inflight.requests - at.inflight.prefill_requests, at.load.running)
