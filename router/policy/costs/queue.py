"""How long until this pod starts on a new prompt?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import NonNegativeInt

from router.policy.ahead import ahead_ms
from router.policy.term import CostTerm, Placement, Side


class QueueTerm(CostTerm):
    """Work that stands before this request, in milliseconds:

        queue = max(0, F + W_in - time since that step began) + W_behind
              + (waiting at the engine beyond our prompts) * T_prefill(foreign_request_tokens, 0)

    Engines compute in steps: the one under way takes its fixed part F and the prompts W_in that are in it, and whoever
    comes meanwhile (W_behind, and this request) is in the next. Prompts count net of their expected hits, through the
    pod's coefficients. Where nothing of ours is there, nothing stands before it. The last part accounts for requests
    that came past us, by another router or directly: what the engine last said, less what we had there then.
    """

    side: ClassVar[Side] = Side.PREFILL
    delays: ClassVar[bool] = True
    foreign_request_tokens: NonNegativeInt = 1024

    def costs_ms(self, placements: Sequence[Placement]) -> list[float]:
        return [
            ahead_ms(at) + self._foreign_ms(at) if at.load.waiting > at.load.our_prompts else ahead_ms(at)
            for at in placements
        ]

    def _foreign_ms(self, at: Placement) -> float:
        return at.load.foreign_waiting * at.pod.speed.prefill_ms(self.foreign_request_tokens)
