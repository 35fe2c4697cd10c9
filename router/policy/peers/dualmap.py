"""Where would DualMap send this?"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from pydantic import NonNegativeFloat

from router.decision import Candidate
from router.policy.peers.reading import inflight_of, match_share
from router.policy.pickers import Ranked
from router.policy.ring import rendezvous, tie_key
from router.policy.term import Configurable
from router.types import Scene


class DualMap(Configurable):
    """Two fixed pods for each prefix, by two hash functions:

        the one of the two with the longer match, while its predicted TTFT <= slo_ms
        else the lighter of the two

    The predicted TTFT is the policy's price: name `queue` and `prefill` among its costs. Equal matches, above all none,
    go to the lighter: the less prefill in flight, then the fewer requests. The prefix is the affinity key (DualMap
    adapts its length, too), and its two pods are the first two of the key's rendezvous order, where each pod has a
    hash of its own: every pair is as likely, and stays. Requests are not migrated once they are sent. The abstract
    names no SLO: 5 s is our choice. Source: arXiv 2602.06502, in reference/algorithms.md 1.9.
    """

    slo_ms: NonNegativeFloat = 5_000.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        key = tie_key(scene)
        two = nlargest(2, candidates, key=lambda candidate: rendezvous(key, candidate.pod.id))
        lighter = min(two, key=lambda candidate: _load(scene, candidate))
        # the lighter stands first, so that it wins where the matches are equal
        affine = max((lighter, *two), key=lambda candidate: match_share(scene, candidate))
        within = affine.cost.total_ms <= self.slo_ms
        chosen = affine if within else lighter
        mapped = {candidate.pod.id for candidate in two}

        def place(candidate: Candidate) -> tuple[bool, bool, float]:
            return candidate is not chosen, candidate.pod.id not in mapped, candidate.cost.total_ms

        reason = "longer match of two, within the SLO" if within else "lighter of two, beyond the SLO"
        return sorted(candidates, key=place), reason


def _load(scene: Scene, candidate: Candidate) -> tuple[float, int]:
    there = inflight_of(scene, candidate)
    return there.prefill_ms, there.requests
