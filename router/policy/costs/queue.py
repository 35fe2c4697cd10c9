"""How long until this pod starts on a new prompt?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import NonNegativeInt

from router.policy.term import CostTerm, Input, Placement, Side, compute_inputs
from router.policy.work_ahead import work_ahead_inputs


class QueueTerm(CostTerm):
    """Work ahead of this request, in milliseconds:

        queue = max(0, F + W_in - time since step began) + W_behind
              + max(0, waiting at engine - our prompts then) * (c0 + c1 f + c2 f^2)        f = foreign_request_tokens

    Engines compute in steps. The current step takes its fixed part F and the prompts in it, W_in; prompts that arrive
    meanwhile (W_behind, and this request) are computed in the next step. Prompts count without their expected cache
    hits. The first part is 0 if no request of ours is on the pod. The last part counts requests of another origin: the
    waiting requests of the last scrape without those that were ours at that time.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True
    foreign_request_tokens: NonNegativeInt = 1024

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [
            at.work_ahead_ms + self._foreign_ms(at) if at.load.waiting > at.load.our_prompts else at.work_ahead_ms
            for at in placements
        ]

    def inputs(self, at: Placement) -> Iterator[Input]:
        speed, load = at.pod.speed, at.load
        yield from work_ahead_inputs(at)
        yield Input("waiting at engine", "requests", load.waiting)
        yield Input("our prompts then", "requests", load.our_prompts)
        if load.foreign_waiting:
            yield Input("c0", "ms", speed.c0_ms)
            yield from compute_inputs(at)

    def _foreign_ms(self, at: Placement) -> float:
        return at.load.foreign_waiting * at.pod.speed.prefill_ms(self.foreign_request_tokens)
