"""A margin that is learnt from how often it was too small.

Adaptive conformal inference (Gibbs and Candès, 2106.00170): after a request that missed its limit the margin grows by
`step` times (1 - `allowed`), after any other it shrinks by `step` times `allowed`. While it is within its bounds, the
share that misses is within `high` / (`step` n) of `allowed` after n requests, however the errors are distributed.
"""

from __future__ import annotations

import msgspec


class LearntMargin(msgspec.Struct, gc=False):
    """A margin between 0 and `high`. `allowed`: the share of requests that may miss their limit."""

    value: float
    high: float
    step: float
    allowed: float

    def observe(self, has_missed: bool) -> None:
        """Learn from one request."""
        moved = self.value + self.step * (has_missed - self.allowed)
        self.value = min(max(moved, 0.0), self.high)
