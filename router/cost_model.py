"""The cost model: times of prefills, decode steps and transfers from their coefficients.

Source: docs/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BYTES_PER_MS_PER_GB_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class PodSpeed:
    """Coefficients of `T_prefill(n, p) = c0 + c1 (n-p) + c2 (n^2 - p^2)` and of a decode step
    `d0 + d1 * batch + d2 * context tokens`; all in milliseconds.

    The simulator's steps with prompts also take at least the time in which the pod's CPU launches their kernels:
    `launch_ms`, or `replay_ms` for at most `graph_tokens` tokens, which replay CUDA graphs. Prices do not contain it.
    """

    c0_ms: float
    c1_ms_per_token: float
    c2_ms_per_token2: float
    d0_ms: float = 0.0
    d1_ms_per_request: float = 0.0
    d2_ms_per_context_token: float = 0.0
    launch_ms: float = 0.0
    replay_ms: float = 0.0
    graph_tokens: int = field(default=512, kw_only=True)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Those of both formulas in field order. `dataclasses.astuple` copies deeply: it takes thirty times as long."""
        return (
            *(self.c0_ms, self.c1_ms_per_token, self.c2_ms_per_token2),
            *(self.d0_ms, self.d1_ms_per_request, self.d2_ms_per_context_token),
        )

    def prefill_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Expected prefill time of a prompt with `cached_tokens` leading tokens in the cache."""
        n, p = prompt_tokens, cached_tokens
        return self.c0_ms + self.c1_ms_per_token * (n - p) + self.c2_ms_per_token2 * (n * n - p * p)

    def least_ms(self, tokens: int) -> float:
        """The least time of a step of that many tokens, prompts among them."""
        return self.launch_ms if tokens > self.graph_tokens else min(self.replay_ms, self.launch_ms)

    def scaled(self, factor: float) -> PodSpeed:
        """A pod that takes `factor` times as long for everything."""
        times_ms = (factor * value for value in (*self.coefficients, self.launch_ms, self.replay_ms))
        return PodSpeed(*times_ms, graph_tokens=self.graph_tokens)

    def compute_ms(self, first_token: int, end_token: int) -> float:
        """The part of a prefill that computes tokens [first, end)."""
        p, n = first_token, end_token
        return self.c1_ms_per_token * (n - p) + self.c2_ms_per_token2 * (n * n - p * p)

    def fixed_ms(self, requests: int, context_tokens: int) -> float:
        """The part of a step that does not depend on its prompts: a decode step if `requests` decode with
        `context_tokens` in total, else c0."""
        if not (requests and self.d0_ms):
            return self.c0_ms
        return self.d0_ms + self.d1_ms_per_request * requests + self.d2_ms_per_context_token * context_tokens

    def step_ms(self, requests: float, context_tokens: float) -> float:
        """Expected time of a decode step of `requests` requests with `context_tokens` in total."""
        return self.d0_ms + self.d1_ms_per_request * requests + self.d2_ms_per_context_token * context_tokens


@dataclass(frozen=True, slots=True)
class Link:
    """A link for KV: a transfer takes `t0 + bytes / bandwidth`."""

    t0_ms: float
    bytes_per_ms: float
    kind: str = ""
    """The class of links that share a calibration."""

    def transfer_ms(self, kv_bytes: float) -> float:
        """Expected time of one transfer without concurrent ones."""
        return self.t0_ms + kv_bytes / self.bytes_per_ms
