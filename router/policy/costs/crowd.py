"""What is the room worth that this request takes from the pod's cache while it is served?"""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Placement, Side

LEAST_FREE = 0.05
"""A pod is never taken to be fuller than this leaves."""


class Crowd(CostTerm):
    """KV of what runs cannot be evicted: the fuller a pod is of it, the less is left for what others come back for:

        crowd = weight * c1 * (n + output_tokens) * used / (1 - used)
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

    def cost_ms(self, at: Placement) -> float:
        capacity_tokens = at.capacity_tokens
        if not capacity_tokens:
            return 0.0
        used = at.load.kv_usage
        told = at.load.running + at.load.waiting
        if 0 < told < at.inflight.requests:
            used *= at.inflight.requests / told
        used += at.inflight.prefill_tokens / capacity_tokens
        if not used:
            return 0.0
        crowding = used / (1 - used) if used < 1 - LEAST_FREE else (1 - LEAST_FREE) / LEAST_FREE
        return self.weight * at.pod.speed.c1_ms_per_token * (at.prompt_tokens + at.output_tokens) * crowding
