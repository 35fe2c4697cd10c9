"""Where would KubeAI send this?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from router.decision import Candidate
from router.policy.peers.reading import inflight_of
from router.policy.pickers import Ranked
from router.policy.ring import rendezvous, tie_key
from router.policy.term import Configurable
from router.types import Scene


class KubeaiChwbl(Configurable):
    """KubeAI, strategy `PrefixHash`: consistent hashing with bounded loads over requests in flight.

        walk the ring from the key; take the first pod with  load + 1 <= mean_load_factor * (total + 1) / n
        where nobody is within that bound, the first on the ring takes the request

    The bound is that of its code, `chwblLoadOK`: while total + 1 < n / mean_load_factor nobody is within it, so that
    the ring alone decides. KubeAI's key is the first 100 characters of the first user message; ours is the affinity
    key, two blocks beyond the prefix that everybody shares. Its ring has 256 points a pod; ours is the rendezvous
    order, which is a ring of endlessly many: as stable, evener, and without 256,000 points to walk over at 1,000 pods.
    Source: reference/algorithms.md 1.8.
    """

    mean_load_factor: Annotated[float, Field(ge=1)] = 1.25

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        key = tie_key(scene)
        total = sum(inflight_of(scene, candidate).requests for candidate in candidates)
        bound = self.mean_load_factor * (total + 1) / len(candidates)

        def place(candidate: Candidate) -> tuple[bool, int]:
            return inflight_of(scene, candidate).requests + 1 > bound, -rendezvous(key, candidate.pod.id)

        return sorted(candidates, key=place), f"first on the ring within {bound:.2f} requests"
