"""How long does this pod compute until the first token?"""

from __future__ import annotations

from router.policy.term import Configurable, Placement


class Prefill(Configurable):
    """T_prefill(n, p) = c0 + c1 (n - p) + c2 (n^2 - p^2), with n prompt tokens of which p are cached there.

    Source: reference/cost-model.md 4.1; fitted per model and hardware with 0.4 to 3.4 % error.
    """

    def cost_ms(self, at: Placement) -> float:
        return at.pod.speed.prefill_ms(at.prompt_tokens, at.cached_tokens)
