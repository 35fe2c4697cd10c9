"""How long does this pod compute until the first token?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from router.policy.term import CostTerm, Input, Placement, Side, compute_inputs, prompt_inputs, tokens_to_encode


class PrefillTerm(CostTerm):
    """The prefill of n prompt tokens of which p need no compute on the pod:

        prefill = F + c1 (n - p + e) + c2 (n^2 - p^2)

    e are the tokens of its pictures that the pod must encode first: those outside the p tokens that it has not seen.
    Encoding takes about as long as the prefill of as many tokens. F is the fixed part of the step that computes them:
    c0, or d0 + d1 b + d2 context if b requests decode in it. Source: docs/cost-model.md#prefill.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if placements and placements[0].request.scene.pictures:
            return [at.fixed_ms + at.compute_ms + at.pod.speed.c1_ms_per_token * _encoded(at) for at in placements]
        return [at.fixed_ms + at.compute_ms for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        yield from prompt_inputs(at)
        yield Input("F", "ms", at.fixed_ms)
        yield from compute_inputs(at)
        if at.request.scene.pictures:
            yield Input("e", "tokens to encode", _encoded(at))


def _encoded(at: Placement) -> int:
    return tokens_to_encode(at.request.scene.pictures, at.pod.id, at.cached_tokens)
