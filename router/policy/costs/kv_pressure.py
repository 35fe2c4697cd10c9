"""What is the room worth that this request takes from the pod's cache while it is served?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Placement, Side

LEAST_FREE = 0.05
"""A pod is never taken to be fuller than this leaves."""


class KvPressureTerm(CostTerm):
    """KV of what runs cannot be evicted: the fuller a pod is of it, the less is left for what others come back for:

        kv_pressure = weight * c1 * (n + output_tokens) * used / (1 - used)
        used = KV in use * max(1, our requests / requests that the engine told of) + prompts before it

    with KV as shares of the capacity; what the engine told is up to a second old. With `weight` 0.3, a pod that is half
    full of running requests is as dear as if 0.3 of this prompt had to be computed once more, and 2.7 of it where nine
    tenths are full. Without this term requests follow their prefixes until their KV fills the whole pod, which evicts
    what the next ones come for: hits that were foreseen are none, and waiting makes it worse. 0 where the capacity is
    unknown.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.3

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        weight, costs_ms = self.weight, []
        for at in placements:
            capacity_tokens, load, work = at.capacity_tokens, at.load, at.inflight
            if not capacity_tokens:
                costs_ms.append(0.0)
                continue
            used, told = load.kv_usage, load.running + load.waiting
            if 0 < told < work.requests:
                used *= work.requests / told
            used += work.prefill_tokens / capacity_tokens
            crowding = used / (1 - used) if used < 1 - LEAST_FREE else (1 - LEAST_FREE) / LEAST_FREE
            costs_ms.append(weight * at.pod.speed.c1_ms_per_token * (at.prompt_tokens + at.output_tokens) * crowding)
        return costs_ms
