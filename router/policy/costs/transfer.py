"""How long does a pull of KV from another pod keep this request waiting?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.policy.ahead import ahead_ms
from router.policy.term import CostTerm, Placement, Side


class TransferTerm(CostTerm):
    """KV that comes from a peer travels while the pod still works on what stands before, and is paid as far as it takes
    longer than that:

        T_x = t0 + kv_bytes_per_token * (p_holder - p_here) / B * (1 + transfers that the holder is sending already)
        transfer = max(0, T_x - queue)

    A policy without this term plans no pulls. Source: reference/cost-model.md 4.2 and 4.3.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [max(0.0, at.pull.transfer_ms - ahead_ms(at)) if at.pull else 0.0 for at in placements]
