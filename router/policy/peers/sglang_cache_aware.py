"""Where would the SGLang router (SMG) send this?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from router.decision import Candidate
from router.policy.peers.reading import inflight_of, lowest_first, match_share
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class SglangCacheAware(Configurable):
    """SGLang router / SMG, policy `cache_aware`, over requests in flight:

        imbalanced  <=>  max - min > balance_abs_threshold  and  max > balance_rel_threshold * min
        imbalanced            -> the shortest queue
        match > cache_threshold -> the best match
        otherwise             -> the smallest tree

    The defaults are those of its code (0.5 / 32 / 1.1); its documentation says 0.3 / 64 / 1.5 and some of its
    configurations 0.8 / - / 1.5. The size of a pod's tree is not in a scene: the fewest prompt tokens in flight stand
    for it, which reacts to load where the original does not. Source: reference/algorithms.md 1.3.
    """

    cache_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    balance_abs_threshold: NonNegativeInt = 32
    balance_rel_threshold: NonNegativeFloat = 1.1

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        requests = [inflight_of(scene, candidate).requests for candidate in candidates]
        if self._imbalanced(min(requests), max(requests)):
            return lowest_first(
                scene, candidates, lambda c: inflight_of(scene, c).requests
            ), "imbalanced: shortest queue"
        if max(match_share(scene, candidate) for candidate in candidates) > self.cache_threshold:
            return lowest_first(scene, candidates, lambda c: -match_share(scene, c)), "balanced: best match"
        return lowest_first(
            scene, candidates, lambda c: inflight_of(scene, c).context_tokens
        ), "balanced: smallest tree"

    def _imbalanced(self, least: int, most: int) -> bool:
        return most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least
