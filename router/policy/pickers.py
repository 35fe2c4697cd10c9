"""Given priced candidates, which comes first?

Three pickers: the cheapest; each in turn; and the ring with a bound on outstanding work. They order, they never
drop: the rest of the list is what a retry uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from router.decision import Candidate
from router.policy.ring import affinity_key, rendezvous, ring_order, session_key, tie_key
from router.policy.term import Configurable
from router.types import Scene

Ranked = tuple[Sequence[Candidate], str]


class LowestCost(Configurable):
    """The cheapest first. Prices within `indifference_ms` of the lowest count as equal, and equal ones are decided by
    the request's affinity key: requests that share a prefix then agree, and no pod gets everything for being a
    microsecond cheaper."""

    indifference_ms: NonNegativeFloat = 0.0

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        return _cheapest_first(scene, candidates, self.indifference_ms), "lowest cost"


class InTurn(Configurable):
    """Round robin over the pods that can serve, ordered by id."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> Ranked:
        start = scene.turn % len(candidates)
        return [*candidates[start:], *candidates[:start]], f"turn {scene.turn}"


class RingBoundedLoad(Configurable):
    """Consistent hashing with a bound on outstanding work.

    Walk the ring from the request's key (its prefix; with `key: session` its session's id, where it has one); the first
    pod whose outstanding work (the policy's costs, in ms) is within

        (1 + headroom) * mean work + slack_prefills * T_prefill(n, 0)

    takes it. A request without a key, or one whose every pod is over the bound, goes to the least loaded. The slack
    keeps the bound from tripping all the time at low load. Source: Mirrokni, Thorup and Zadimoghaddam 2016; the
    finding on slack: reference/algorithms.md 1.8.
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
        by_id = {candidate.pod.id: candidate for candidate in reversed(cheapest)}
        order = [by_id[pod] for pod in ring_order(key, tuple(by_id), self.points_per_pod)]
        within = [candidate for candidate in order if candidate.cost.total_ms <= bound_ms]
        if not within:
            return cheapest, f"every pod above {bound_ms:.0f} ms: least loaded"
        chosen = set(map(id, within))
        rest = [candidate for candidate in cheapest if id(candidate) not in chosen]
        return [*within, *rest], f"ring position {order.index(within[0]) + 1}, bound {bound_ms:.0f} ms"

    def _bound_ms(self, scene: Scene, candidates: Sequence[Candidate]) -> float:
        mean_ms = sum(candidate.cost.total_ms for candidate in candidates) / len(candidates)
        tokens = scene.prompt.token_count if scene.prompt else 0
        prefill_ms = max(candidate.pod.speed.prefill_ms(tokens) for candidate in candidates)
        return (1 + self.headroom) * mean_ms + self.slack_prefills * prefill_ms


_total_ms = attrgetter("cost.total_ms")
SAME_PRICE_MS = 0.001
"""Sums of floats differ in bits where prices are the same."""


def _cheapest_first(scene: Scene, candidates: Sequence[Candidate], indifference_ms: float = 0.0) -> list[Candidate]:
    """By price; the order among those that cost as much as the cheapest is the request's key's."""
    by_price = sorted(candidates, key=_total_ms)
    highest_ms = by_price[0].cost.total_ms + max(indifference_ms, SAME_PRICE_MS)
    if len(by_price) == 1 or by_price[1].cost.total_ms > highest_ms:
        return by_price
    equal = bisect_right(by_price, highest_ms, key=_total_ms)
    key = tie_key(scene)
    first = sorted(by_price[:equal], key=lambda candidate: rendezvous(key, candidate.plan.pod.id), reverse=True)
    return [*first, *by_price[equal:]]
