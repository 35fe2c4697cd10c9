"""How long until this pod starts on a new prompt?"""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeInt

from router.policy.term import Configurable, Placement, Side


class Queue(Configurable):
    """Work that stands before this request, in milliseconds of prefill:

        queue = prefill_ms of our requests there that have no first token yet, less what the first of them has had
              + (waiting at the engine beyond those) * T_prefill(foreign_request_tokens, 0)

    The first part is exact in what we know: prompts net of their expected hits, through the pod's coefficients.
    The second accounts for requests that came past us, by another router or directly.
    """

    side: ClassVar[Side] = Side.PREFILL
    foreign_request_tokens: NonNegativeInt = 1024

    def cost_ms(self, at: Placement) -> float:
        inflight = at.inflight
        foreign = at.load.waiting - inflight.prefill_requests
        if foreign <= 0:
            return inflight.queue_ms(at.now_s)
        return inflight.queue_ms(at.now_s) + foreign * at.pod.speed.prefill_ms(self.foreign_request_tokens)
