"""How long does a pull of KV from another pod delay this request?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from router.policy.term import CostTerm, Input, Placement, Side, transfer_inputs
from router.policy.work_ahead import work_ahead_inputs


class TransferTerm(CostTerm):
    """KV from a peer travels while the pod computes the work ahead of this request; only the rest of the time counts:

        T_x = pull t0 + kv_bytes_per_token * pull tokens / pull B * (1 + pull concurrent)
        transfer = max(0, T_x - max(0, F + W_in - time since step began) - W_behind)

    `pull tokens` are those that the holder has beyond this pod, `pull concurrent` the other transfers of the holder.
    The work ahead is that of `queue`, without requests of another origin. A policy without this term plans no pulls.
    Source: docs/cost-model.md#transfer.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [max(at.pull.transfer_ms - at.work_ahead_ms, 0.0) if at.pull else 0.0 for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pull:
            yield from transfer_inputs("pull", at.pull, at)
            yield from work_ahead_inputs(at)
