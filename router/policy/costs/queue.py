"""How long until this pod starts on a new prompt?"""

from __future__ import annotations

from pydantic import NonNegativeInt

from router.policy.term import Configurable, Placement


class Queue(Configurable):
    """Work that stands before this request, in milliseconds of prefill:

        queue = prefill_ms of our requests there that have no first token yet
              + (waiting at the engine beyond those) * T_prefill(foreign_request_tokens, 0)

    The first part is exact in what we know: prompts net of their expected hits, through the pod's coefficients.
    The second accounts for requests that came past us, by another router or directly.
    """

    foreign_request_tokens: NonNegativeInt = 1024

    def cost_ms(self, at: Placement) -> float:
        inflight = at.inflight
        foreign = at.load.waiting - inflight.prefill_requests
        if foreign <= 0:
            return inflight.prefill_ms
        return inflight.prefill_ms + foreign * at.pod.speed.prefill_ms(self.foreign_request_tokens)
