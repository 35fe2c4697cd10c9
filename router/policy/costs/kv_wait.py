"""How long until there is room for this prompt's KV?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeFloat

from router.policy.term import CostTerm, Placement, Side


class KvWaitTerm(CostTerm):
    """A prompt is admitted when the KV of what runs has made room for it:

        short = KV in use + prompts before it + n - capacity        in tokens, 0 where everything fits
        kv_wait = weight * short / KV in use * output_tokens * step_ms

    Requests end one by one over the time that one of them runs, and give their KV back as they do: so a share of it is
    free after that share of the time. KV in use is what the engine last said, prompts before it are those that have no
    first token yet. 0 where the capacity is unknown. Source: reference/simulator.md 5.2 (admission).
    """

    side: ClassVar[Side] = Side.DECODE
    delays: ClassVar[bool] = True
    weight: NonNegativeFloat = 1.0

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [self._waiting_ms(at) if at.capacity_tokens else 0.0 for at in placements]

    def _waiting_ms(self, at: Placement) -> float:
        inflight, capacity_tokens = at.inflight, at.capacity_tokens
        used_tokens = at.load.kv_usage * capacity_tokens
        short_tokens = used_tokens + inflight.prefill_tokens + at.prompt_tokens + at.output_tokens - capacity_tokens
        if short_tokens <= 0:
            return 0.0
        running = max(inflight.requests - inflight.prefill_requests, at.load.running, 1)
        step_ms = at.pod.speed.step_ms(running, used_tokens)
        return self.weight * short_tokens / max(used_tokens, 1.0) * at.output_tokens * step_ms
