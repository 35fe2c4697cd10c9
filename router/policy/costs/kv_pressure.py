"""What is the KV memory worth that this request takes from the pod while it is served?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side, kv_inputs

MAX_USED = 0.95
"""A fuller pod counts as this full."""
MAX_PRESSURE = MAX_USED / (1 - MAX_USED)


class KvPressureTerm(CostTerm):
    """KV of running requests cannot be evicted: the more of it on a pod, the less cache is left for other requests:

        kv_pressure = weight * c1 * (n + expected output) * used / (1 - used)
        used = KV in use * max(1, our requests / requests at engine) + prompts before it / KV capacity

    `KV in use` and `requests at engine` are the last scrape, up to a second old. With `weight` 0.3, a pod half full of
    running requests costs as much as computing 0.3 of this prompt again, and one that is 90 % full as much as 2.7 of
    it. Without this term requests follow their prefixes until their KV fills the pod, which evicts the prefixes of the
    next ones: predicted hits fail, and waiting makes it worse. `used` is at most 0.95. 0 if the capacity is unknown.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = False
    weight: NonNegativeFloat = 0.3

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        if not placements:
            return []
        costs_ms = []
        weight, request = self.weight, placements[0].request
        needed_tokens = request.prompt_tokens + request.output_tokens
        for at in placements:
            pod, load, work = at.pod, at.load, at.inflight
            if not (capacity_tokens := pod.capacity_tokens):
                costs_ms.append(0.0)
                continue
            used, at_engine = load.kv_usage, load.running + load.waiting
            if at_engine and at_engine < work.requests:
                used *= work.requests / at_engine
            used += work.prefill_tokens / capacity_tokens
            pressure = used / (1 - used) if used < MAX_USED else MAX_PRESSURE
            costs_ms.append(weight * pod.speed.c1_ms_per_token * needed_tokens * pressure)
        return costs_ms

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pod.capacity_tokens:
            yield Input("n", "prompt tokens", at.request.prompt_tokens)
            yield Input("expected output", "tokens", at.request.output_tokens)
            yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
            yield from kv_inputs(at)
            yield Input("our requests", "requests", at.inflight.requests)
            yield Input("requests at engine", "requests", at.load.running + at.load.waiting)
