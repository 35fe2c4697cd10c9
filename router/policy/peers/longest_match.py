"""What happens when only the cache counts?"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Candidate
from router.policy.peers.reading import lowest_first, match_share
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class LongestMatch(Configurable):
    """argmax of the match, load unseen.

    The highest hit rate that a decision can ask for, and the collapse that comes with it: whoever has the shared
    prefix first gets everybody. Source: reference/published-results.md 3.1.
    """

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        ranked = lowest_first(scene, candidates, lambda candidate: -match_share(scene, candidate))
        return ranked, f"longest match, {match_share(scene, ranked[0]):.0%}"
