"""What would one way of serving a request cost by that policy?

The same placements and terms as in `decide`, for a choice that somebody else made: another policy, or a recording. This
file never ranks anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.decision import Cost, Plan, Split
from router.policy.plans import Planner, prompt_token_count
from router.policy.spec import Policy
from router.policy.term import Costs, Placement, Side
from router.types import PodId, PodStatus, Scene


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which pods serve a request: the one that answers; the one that computes its prompt, or that sends it KV, where
    there is one. A plan without its prices."""

    pod: PodId
    prefill_pod: PodId = ""
    pull_from: PodId = ""

    def __str__(self) -> str:
        if self.prefill_pod:
            return f"{self.prefill_pod} > {self.pod}"
        return f"{self.pod} < {self.pull_from}" if self.pull_from else self.pod


def choice_of(plan: Plan) -> Choice:
    """The pods of a plan."""
    if isinstance(plan, Split):
        return Choice(plan.decode.id, plan.prefill.id)
    return Choice(plan.pod.id, pull_from=plan.pull.holder if plan.pull else "")


def placed(scene: Scene, choice: Choice, *, pulls: bool = True) -> Sequence[tuple[Side | None, Placement]]:
    """What the terms price of it: one placement, or one for each side of a split; none where its pods are not there."""
    planner = Planner(scene, prompt_token_count(scene))
    answering = scene.fleet.find(choice.pod)
    if answering is None:
        return ()
    if choice.prefill_pod:
        prefill = scene.fleet.find(choice.prefill_pod)
        return _pair(planner, prefill, answering) if prefill else ()
    direct = planner.placements([answering])
    return [(None, at) for at in (choice.pull_from and pulls and planner.pulling(direct)) or direct]


def price(scene: Scene, choice: Choice, policy: Policy) -> Cost | None:
    """Its price in milliseconds; None where its pods are not there, or no link is between them. O(log pods), but for a
    pull.

    A pull counts as none where the policy has no price for it."""
    places = placed(scene, choice, pulls=policy.pulls)
    if not places:
        return None
    parts = tuple((name, term.cost_ms(at)) for side, at in places for name, term in _terms(policy, side))
    return Cost.of(parts, sum([ms for _, ms in parts]))


def _terms(policy: Policy, side: Side | None) -> Costs:
    return policy.costs if side is None else policy.costs_of(side)


def _pair(planner: Planner, prefill: PodStatus, decode: PodStatus) -> Sequence[tuple[Side | None, Placement]]:
    first, second = planner.placements([prefill, decode])
    receiving = planner.receiving(first, second)
    return [(Side.PREFILL, first), (Side.DECODE, receiving)] if receiving else ()
