"""Where would AIBrix's gateway send this?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt

from router.decision import Candidate
from router.policy.peers.reading import inflight_of, lowest_first, match_share
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class AibrixPrefixCache(Configurable):
    """AIBrix, policy `prefix-cache`, over requests in flight:

        max - min > imbalance_requests -> only the pods with the fewest requests remain
        sort by match, descending, then by requests, ascending
        take the first with requests <= mean + standard_deviations * sigma

    Mean and sigma are those of all pods. Where nobody matches, that is the pod with the fewest requests, as in AIBrix.
    Source: reference/algorithms.md 1.6.
    """

    imbalance_requests: NonNegativeInt = 8
    standard_deviations: NonNegativeFloat = 1.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        requests = [inflight_of(scene, candidate).requests for candidate in candidates]
        imbalanced = max(requests) - min(requests) > self.imbalance_requests
        bound = min(requests) if imbalanced else self._bound(requests)

        def score(candidate: Candidate) -> tuple[bool, float, int]:
            there = inflight_of(scene, candidate).requests
            return there > bound, -match_share(scene, candidate), there

        state = "imbalanced" if imbalanced else "balanced"
        return lowest_first(scene, candidates, score), f"{state}: best match with at most {bound:.1f} requests"

    def _bound(self, requests: Sequence[int]) -> float:
        mean = sum(requests) / len(requests)
        variance = sum((count - mean) ** 2 for count in requests) / len(requests)
        return mean + self.standard_deviations * math.sqrt(variance)
