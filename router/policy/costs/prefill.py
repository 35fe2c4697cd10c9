"""How long does this pod compute until the first token?"""

from __future__ import annotations

from typing import ClassVar

from router.policy.term import Configurable, Placement, Side


class Prefill(Configurable):
    """T_prefill(n, p) = c0 + c1 (n - p) + c2 (n^2 - p^2), with n prompt tokens of which p need no compute there.

    Source: reference/cost-model.md 4.1; fitted per model and hardware with 0.4 to 3.4 % error.
    """

    side: ClassVar[Side] = Side.PREFILL

    def cost_ms(self, at: Placement) -> float:
        return at.pod.speed.prefill_ms(at.prompt_tokens, at.cached_tokens)
