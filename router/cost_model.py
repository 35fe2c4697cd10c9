"""What do prefill, decode steps and transfers take?

The formulas of the cost model with their coefficients, as values. Where the coefficients come from is nobody's business
here: this file imports nothing of ours. Source: reference/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_MS_PER_GB_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class PodSpeed:
    """Coefficients of `T_prefill(n, p) = c0 + c1 (n-p) + c2 (n^2 - p^2)` and of a decode step
    `d0 + d1 * batch + d2 * context tokens`; all in milliseconds. Source: reference/cost-model.md 4.1."""

    c0_ms: float
    c1_ms_per_token: float
    c2_ms_per_token2: float
    d0_ms: float = 0.0
    d1_ms_per_request: float = 0.0
    d2_ms_per_context_token: float = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """In that order. `dataclasses.astuple` copies deeply and takes thirty times as long."""
        return (
            *(self.c0_ms, self.c1_ms_per_token, self.c2_ms_per_token2),
            *(self.d0_ms, self.d1_ms_per_request, self.d2_ms_per_context_token),
        )

    def prefill_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Expected prefill time of a prompt of which `cached_tokens` leading tokens need no compute."""
        n, p = prompt_tokens, cached_tokens
        return self.c0_ms + self.c1_ms_per_token * (n - p) + self.c2_ms_per_token2 * (n * n - p * p)

    def compute_ms(self, first_token: int, end_token: int) -> float:
        """The part of a prefill that computes tokens [first, end)."""
        p, n = first_token, end_token
        return self.c1_ms_per_token * (n - p) + self.c2_ms_per_token2 * (n * n - p * p)

    def fixed_ms(self, requests: int, context_tokens: int) -> float:
        """The part of a step that all prompts in it share: a decode step where others decode, with that much context in
        all, else c0. Source: reference/simulator.md 5.2."""
        return self.step_ms(requests, context_tokens) if requests and self.d0_ms else self.c0_ms

    def step_ms(self, requests: float, context_tokens: float) -> float:
        """One decode step of that many requests with that much context in all."""
        return self.d0_ms + self.d1_ms_per_request * requests + self.d2_ms_per_context_token * context_tokens


@dataclass(frozen=True, slots=True)
class Link:
    """A way for KV: `t0 + bytes / bandwidth`. Source: reference/cost-model.md 4.2."""

    t0_ms: float
    bytes_per_ms: float
    kind: str = ""
    """The class of links that it belongs to, by which it is learnt."""

    def transfer_ms(self, kv_bytes: float) -> float:
        """Expected time of one transfer that has the link for itself."""
        return self.t0_ms + kv_bytes / self.bytes_per_ms
