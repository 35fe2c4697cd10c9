"""Which share of the hits that are only estimated do engines report, by class of pods?

Where an engine does not announce what it keeps, a dispatched prompt counts as kept, and its eviction is not noticed:
the estimate is an upper bound. Pure: it knows no pods and no time.
"""

from __future__ import annotations

from collections.abc import Hashable

_PRIOR_TOKENS = 20_000.0
"""Tokens of hits that count as confirmed from the start."""
_LASTING_TOKENS = 1_000_000.0
"""Observations of earlier hits count half once there are as many new ones."""
_MIN_SHARE = 0.1
"""A share of 0 would never be measured again."""
_MAX_CLASSES = 256


class MeasuredHits:
    """Estimated and reported tokens of each class."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[float, float]] = {}

    def observe(self, of: Hashable, expected_tokens: int, reported_tokens: int) -> None:
        """`expected_tokens`: the estimate times the share."""
        estimated = expected_tokens / self.share(of)
        if not estimated or (of not in self._sums and len(self._sums) >= _MAX_CLASSES):
            return
        total, reported = self._sums.get(of, (_PRIOR_TOKENS, _PRIOR_TOKENS))
        kept = 0.5 ** (estimated / _LASTING_TOKENS)
        self._sums[of] = total * kept + estimated, reported * kept + min(reported_tokens, estimated)

    def share(self, of: Hashable) -> float:
        """0.1 to 1."""
        total, reported = self._sums.get(of, (1.0, 1.0))
        return max(reported / total, _MIN_SHARE)
