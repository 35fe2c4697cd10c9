"""The pickers: they order priced candidates.

They never drop a candidate: a retry uses the rest of the list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from router.decision import Candidate, Split
from router.policy.ring import affinity_key, fleet_ring, rendezvous, session_key, tie_key
from router.policy.term import Configurable
from router.types import Scene

Ranked = tuple[Sequence[Candidate], str]


class LowestCost(Configurable):
    """The cheapest first. Costs within `indifference_ms` of the lowest are equal; the request's affinity key decides
    among these, so that requests with a common prefix agree, and a pod that is a microsecond cheaper does not get all
    requests."""

    indifference_ms: NonNegativeFloat = 0.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        return _cheapest_first(scene, candidates, self.indifference_ms), "lowest cost"


class InTurn(Configurable):
    """Round robin over the eligible pods, ordered by id."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        start = scene.turn % len(candidates)
        return [*candidates[start:], *candidates[:start]], f"turn {scene.turn}"


RING_CANDIDATES = 4
"""Candidates in ring order; the others follow by cost."""


class RingBoundedLoad(Configurable):
    """Consistent hashing with a bound on outstanding work.

    Walk the ring from the request's key (its prefix; with `key: session` its session id, if it has one) and take the
    first pod whose outstanding work (the policy's costs, in ms) is at most

        (1 + headroom) * mean work + slack_prefills * T_prefill(n, 0)

    Retries use the next such pods on the ring, then the others by cost. A request without a key, or with every pod over
    the bound, uses the least loaded pod. Without slack the bound would
    be exceeded all the time at low load. Source: docs/cost-model.md#bounded-load.

    Each pod has four points on the ring for each of `points_per_pod`, because one hash gives four.
    """

    key: Literal["prefix", "session"] = "prefix"
    headroom: NonNegativeFloat = 0.25
    slack_prefills: NonNegativeFloat = 1.0
    points_per_pod: PositiveInt = 100

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        cheapest = _cheapest_first(scene, candidates)
        key = (session_key(scene) if self.key == "session" else None) or affinity_key(scene)
        if key is None:
            return cheapest, "no affinity key: least loaded"
        bound_ms = self._bound_ms(scene, candidates)
        by_id = {candidate.plan.pod.id: candidate for candidate in reversed(cheapest)}
        within = {pod: candidate for pod, candidate in by_id.items() if candidate.cost.total_ms <= bound_ms}
        if not within:
            return cheapest, f"every pod above {bound_ms:.0f} ms: least loaded"
        walk = filter(by_id.__contains__, fleet_ring(scene.fleet, self.points_per_pod).walk(key))
        position, home = next((at, pod) for at, pod in enumerate(walk, start=1) if pod in within)
        following = islice(filter(within.__contains__, walk), min(len(within), RING_CANDIDATES) - 1)
        first = [within[pod] for pod in (home, *following)]
        chosen = set(map(id, first))
        rest = [candidate for candidate in cheapest if id(candidate) not in chosen]
        return [*first, *rest], f"ring position {position}, bound {bound_ms:.0f} ms"

    def _bound_ms(self, scene: Scene, candidates: Sequence[Candidate]) -> float:
        mean_ms = sum(candidate.cost.total_ms for candidate in candidates) / len(candidates)
        tokens = scene.prompt.token_count if scene.prompt else 0
        prefill_ms = max(candidate.pod.speed.prefill_ms(tokens) for candidate in candidates)
        return (1 + self.headroom) * mean_ms + self.slack_prefills * prefill_ms


_total_ms = attrgetter("cost.total_ms")
SAME_PRICE_MS = 0.001
"""Sums of floats differ in the last bits for equal costs."""


def _cheapest_first(scene: Scene, candidates: Sequence[Candidate], indifference_ms: float = 0.0) -> list[Candidate]:
    """By cost; candidates that cost the same as the cheapest are ordered by the request's key. Splits stay in the order
    of their pods: one with a part of the prompt is cheaper, and the others are taken in turn."""
    by_price = sorted(candidates, key=_total_ms)
    highest_ms = by_price[0].cost.total_ms + max(indifference_ms, SAME_PRICE_MS)
    if len(by_price) == 1 or by_price[1].cost.total_ms > highest_ms:
        return by_price
    equal = bisect_right(by_price, highest_ms, key=_total_ms)
    if all(isinstance(candidate.plan, Split) for candidate in by_price[:equal]):
        return by_price
    key = tie_key(scene)
    first = sorted(by_price[:equal], key=lambda candidate: rendezvous(key, candidate.plan.pod.id), reverse=True)
    return [*first, *by_price[equal:]]
