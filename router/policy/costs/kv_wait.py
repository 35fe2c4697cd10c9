"""How long until the pod has space for this prompt's KV?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Input, Placement, Side, decode_inputs, kv_inputs


class KvWaitTerm(CostTerm):
    """An engine admits a prompt when running requests have freed enough KV for it:

        used = KV in use * KV capacity
        short = used + prompts before it + n + expected output - KV capacity        0 if everything fits
        kv_wait = weight * short / used * expected output * (d0 + d1 * max(requests decoding, 1) + d2 * used)

    Running requests end one by one over the time that one of them takes, and free their KV as they end: a share of it
    is free after that share of the time. `KV in use` is the last scrape, as a share of the capacity; `prompts before
    it` are those without a first token. 0 if the capacity is unknown. Source: docs/cost-model.md#kv-space.
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = True
    weight: NonNegativeFloat = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._waiting_ms(at, at.pod.capacity_tokens or 0) for at in placements]

    def inputs(self, at: Placement) -> Iterator[Input]:
        if at.pod.capacity_tokens:
            yield Input("n", "prompt tokens", at.request.prompt_tokens)
            yield from kv_inputs(at)
            yield from decode_inputs(at)
            yield Input("d0", "ms", at.pod.speed.d0_ms)

    def _waiting_ms(self, at: Placement, capacity_tokens: int) -> float:
        request, used_tokens = at.request, at.load.kv_usage * capacity_tokens
        short_tokens = used_tokens + at.inflight.prefill_tokens + request.prompt_tokens + request.output_tokens
        short_tokens -= capacity_tokens
        if not capacity_tokens or short_tokens <= 0:
            return 0.0
        step_ms = at.pod.speed.step_ms(max(at.decoding_requests, 1), used_tokens)
        return self.weight * short_tokens / max(used_tokens, 1.0) * request.output_tokens * step_ms
