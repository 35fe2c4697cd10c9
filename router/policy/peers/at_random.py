"""What does routing by lot achieve?"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Candidate
from router.policy.peers.reading import drawn
from router.policy.pickers import Ranked
from router.policy.term import Configurable
from router.types import Scene


class AtRandom(Configurable):
    """A pod by lot, and from there on the next ones: the floor that every figure stands on."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        start = drawn(scene, len(candidates))
        return [*candidates[start:], *candidates[:start]], "by lot"
