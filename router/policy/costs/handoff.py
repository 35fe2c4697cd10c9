"""How long after the prefill does the decode pod have the KV?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import PositiveInt

from router.policy.term import CostTerm, Input, Placement, Side, Transfer, transfer_inputs


class HandoffTerm(CostTerm):
    """The part of a handoff that the client waits for:

        T_x = handoff t0 + kv_bytes_per_token * handoff tokens / handoff B * (1 + handoff concurrent)
        handoff = T_x - min(T_x - handoff t0, T_prefill) * (layers - 1) / layers

    `handoff tokens` are those that the decode pod does not hold, `handoff concurrent` the other transfers of the
    prefill pod, `T_prefill` its prefill. With `layers` above 1 the KV of a layer is sent while the next layers are
    computed, which hides all but one layer's share. A policy without this term plans no splits. Source:
    docs/cost-model.md#layer-by-layer.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = True
    layers: PositiveInt = 1

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._visible_ms(at.handoff) if at.handoff else 0.0 for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.handoff:
            yield from transfer_inputs("handoff", at.handoff, at)
            yield Input("T_prefill", "ms", at.handoff.prefill_ms)

    def _visible_ms(self, handoff: Transfer) -> float:
        moving_ms = handoff.transfer_ms - handoff.link.t0_ms
        hidden_ms = min(moving_ms, handoff.prefill_ms) * (self.layers - 1) / self.layers
        return handoff.transfer_ms - hidden_ms
