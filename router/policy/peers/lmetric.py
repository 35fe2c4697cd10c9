"""Where would LMetric send this?"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Candidate
from router.policy.peers.reading import inflight_of, lowest_first, uncached_tokens
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class LMetric(Configurable):
    """LMetric's product, which has no knob:

        score_i = (prefill tokens waiting on i + n - p_i) * (batch size on i + 1)
        argmin

    n prompt tokens of which p_i are cached on i; the batch are the requests in flight, and the 1 is this one. Source:
    arXiv 2603.15202, in reference/algorithms.md 1.11.
    """

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        ranked = lowest_first(scene, candidates, lambda candidate: _score(scene, candidate))
        return ranked, f"lowest product, {_score(scene, ranked[0])}"


def _score(scene: Scene, candidate: Candidate) -> int:
    there = inflight_of(scene, candidate)
    return (there.prefill_tokens + uncached_tokens(scene, candidate)) * (there.requests + 1)
