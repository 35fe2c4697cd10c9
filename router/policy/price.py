"""Prices a given choice of pods under a policy, as `decide` would.

The choice comes from another policy or from a recording.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.decision import Cost, Plan, Split
from router.policy.plans import Planner, prompt_token_count
from router.policy.spec import Policy
from router.policy.term import Placement, Side
from router.types import PodId, PodStatus, Scene


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A plan without its cost: the pod that answers, and the pod that computes the prompt or sends KV, if any."""

    pod: PodId
    prefill_pod: PodId = ""
    pull_from: PodId = ""

    def __str__(self) -> str:
        computing = self.prefill_pod or self.pod
        computing = f"{computing} < {self.pull_from}" if self.pull_from else computing
        return f"{computing} > {self.pod}" if self.prefill_pod else computing


def choice_of(plan: Plan) -> Choice:
    if isinstance(plan, Split):
        return Choice(plan.decode.id, plan.prefill.id, plan.pull.holder if plan.pull else "")
    return Choice(plan.pod.id, pull_from=plan.pull.holder if plan.pull else "")


def placed(scene: Scene, choice: Choice, *, pulls: bool) -> Sequence[tuple[Side | None, Placement]]:
    """Its placements: one, or one for each side of a split; empty if a pod is missing. `pulls`: whether pulls count."""
    planner = Planner(scene, prompt_token_count(scene))
    answering = scene.fleet.find(choice.pod)
    if answering is None:
        return ()
    if choice.prefill_pod:
        prefill = scene.fleet.find(choice.prefill_pod)
        return _pair(planner, prefill, answering, pulls=pulls and bool(choice.pull_from)) if prefill else ()
    direct = planner.placements([answering])
    return [(None, at) for at in (choice.pull_from and pulls and planner.pulling(direct)) or direct]


def price(scene: Scene, choice: Choice, policy: Policy) -> Cost | None:
    """Its cost in milliseconds; None if a pod is missing or no link connects the two. O(log pods), or O(pods) for a
    pull. Without a term that prices pulls the choice is priced without its pull."""
    places = placed(scene, choice, pulls=policy.pulls)
    if not places:
        return None
    parts = tuple((name, term.cost_ms(at)) for side, at in places for name, term in policy.costs_of(side))
    return Cost.of(parts, sum([ms for _, ms in parts]))


def _pair(
    planner: Planner, prefill: PodStatus, decode: PodStatus, *, pulls: bool
) -> Sequence[tuple[Side | None, Placement]]:
    first, second = planner.placements([prefill, decode])
    if pulls and (pulling := planner.pulling([first])):
        first = pulling[0]
    receiving = planner.receiving(first, second)
    return [(Side.PREFILL, first), (Side.DECODE, receiving)] if receiving else ()
