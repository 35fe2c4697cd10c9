"""How long after the prefill does the decode pod have the KV?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import PositiveInt

from router.policy.term import CostTerm, Placement, Side, Transfer


class HandoffTerm(CostTerm):
    """The part of a handoff that the client waits for:

        T_x = t0 + kv_bytes_per_token * (n - p_decode) / B * (1 + transfers that the prefill pod is sending already)
        handoff = T_x, of which all but one layer's share is hidden where `layers` of KV are sent while others compute

    A policy without this term splits nothing. Source: reference/cost-model.md 4.3, layer-wise streaming.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = True
    layers: PositiveInt = 1

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._visible_ms(at.handoff) if at.handoff else 0.0 for at in placements]

    def _visible_ms(self, handoff: Transfer) -> float:
        moving_ms = handoff.transfer_ms - handoff.t0_ms
        hidden_ms = min(moving_ms, handoff.prefill_ms) * (self.layers - 1) / self.layers
        return handoff.transfer_ms - hidden_ms
