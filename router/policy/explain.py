"""Why did this request go to this pod?

A decision as a table that can be recomputed by hand: for each candidate the parts of its cost in milliseconds, and the
inputs of their formulas with units. The inputs are read from the recorded scene with the code that decided.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from math import floor
from typing import Any

import msgspec

from router.decision import Candidate, Split
from router.policy.calibration import class_key
from router.policy.decide import expected_ttft_ms
from router.policy.eligible import LeftOut, left_out
from router.policy.pickers import LowestCost
from router.policy.price import Choice, choice_of, placed
from router.policy.ring import tie_key_source
from router.policy.spec import Policy
from router.policy.term import CostTerm, Input, Side, prompt_inputs
from router.types import Scene

ON_DECODE_POD = " (decode pod)"


class PricedPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A candidate with its cost. `ttft_ms`: the part of the total that is time until the first token."""

    choice: Choice
    parts: tuple[tuple[str, float], ...]
    total_ms: float
    ttft_ms: float
    cached_tokens: int = 0
    handoff_tokens: int = 0
    money: float | None = None
    """What a provider takes."""


class Column(msgspec.Struct, frozen=True):
    """One candidate with the inputs of its cost."""

    plan: PricedPlan
    inputs: tuple[Input, ...]
    costs_of: str = ""
    """The class of pods, `model/engine/hardware`, whose measured costs it has: those of the pod that computes the
    prompt."""


class TermNote(msgspec.Struct, frozen=True):
    """A cost term: its formula, and its parameters in the policy."""

    name: str
    formula: str
    parameters: dict[str, Any]


class Explanation(msgspec.Struct, frozen=True):
    """A decision, best candidates first; `candidate_count` includes those without a column."""

    request_id: str
    model: str
    policy: str
    version: str
    reason: str
    why: str
    candidate_count: int
    left_out: tuple[LeftOut, ...]
    terms: tuple[TermNote, ...]
    columns: tuple[Column, ...]


def priced(candidate: Candidate) -> PricedPlan:
    plan, cost = candidate.plan, candidate.cost
    handoff_tokens = plan.handoff_tokens if isinstance(plan, Split) else 0
    times = cost.parts, cost.total_ms, expected_ttft_ms(cost)
    return PricedPlan(choice_of(plan), *times, candidate.cached_tokens, handoff_tokens, candidate.money)


def explain(scene: Scene, policy: Policy, plans: Sequence[PricedPlan], count: int, reason: str) -> Explanation:
    """The decision that `policy` made in `scene`: the first of `count` candidates. O(pods * candidates given)."""
    return Explanation(
        request_id=scene.request.id,
        model=scene.request.model,
        policy=policy.name,
        version=policy.version,
        reason=reason,
        why=_why(scene, policy, plans, count, reason),
        candidate_count=count,
        left_out=tuple(left_out(scene, policy)),
        terms=tuple(TermNote(name, _formula(term), term.model_dump()) for name, term in policy.costs),
        columns=tuple(_column(scene, policy, plan) for plan in plans),
    )


def in_hundredths(parts_ms: Sequence[float], total_ms: float) -> list[int]:
    """The parts in hundredths of a millisecond; they add up to the rounded total exactly.

    Each part is rounded down, then as many as needed are rounded up, those with the largest remainder first."""
    exact = [ms * 100 for ms in parts_ms]
    found = [floor(value) for value in exact]
    if not found:
        return []
    missing = round(total_ms * 100) - sum(found)
    each, some = divmod(missing, len(found))
    for at in sorted(range(len(found)), key=lambda at: exact[at] - found[at], reverse=True):
        found[at] += each + (some > 0)
        some -= 1
    return found


def printed(plan: PricedPlan) -> dict[str, int]:
    """Its parts by name, in hundredths of a millisecond that add up to the total."""
    cents = in_hundredths([ms for _, ms in plan.parts], plan.total_ms)
    return dict(zip((name for name, _ in plan.parts), cents, strict=True))


# --- the summary ---


def _why(scene: Scene, policy: Policy, plans: Sequence[PricedPlan], count: int, reason: str) -> str:
    first = plans[0]
    prompt_tokens = scene.prompt.token_count if scene.prompt else None
    hit = (
        f" {first.cached_tokens:,} of {prompt_tokens:,} prompt tokens were expected in its cache."
        if prompt_tokens
        else " Its prompt was not read: n is estimated from the length of the body."
    )
    if count == 1:
        return f"Only {first.choice} could serve it.{hit}"
    return f"{first.choice}, by {reason}: {_against(scene, policy, first, plans[1])}.{hit}"


def _against(scene: Scene, policy: Policy, first: PricedPlan, second: PricedPlan) -> str:
    """The comparison with the second candidate, from the rounded parts, so that a reader gets the same difference."""
    if not policy.costs:
        return "this policy has no costs"
    ours, theirs = printed(first), printed(second)
    less_ms = (sum(theirs.values()) - sum(ours.values())) / 100
    if isinstance(policy.picker, LowestCost) and abs(less_ms) <= policy.picker.indifference_ms:
        within = f" within {policy.picker.indifference_ms:g} ms" if less_ms else ""
        return f"{second.choice} costs the same{within}, and a hash of {tie_key_source(scene)} decided"
    if less_ms == 0:
        return f"{second.choice} costs the same"
    if less_ms < 0:
        return f"{second.choice} is {-less_ms:,.2f} ms cheaper, but this policy does not choose by cost alone"
    _, name = max((theirs.get(name, 0) - cents, name) for name, cents in ours.items())
    parts = f"{name} ({ours[name] / 100:,.2f} instead of {theirs.get(name, 0) / 100:,.2f})"
    return f"{less_ms:,.2f} ms cheaper than {second.choice}, mostly in {parts}"


def _formula(term: CostTerm) -> str:
    """The equations of a term's docstring, one per line: its indented lines, or else its first line."""
    lines = (inspect.getdoc(term) or "").splitlines()
    indented = [" ".join(line.split()) for line in lines if line.startswith("    ")]
    found = ""
    for line in indented or lines[:1]:
        found += ("\n" if " = " in line else " ") + line
    return found.strip()


# --- inputs ---


def _column(scene: Scene, policy: Policy, plan: PricedPlan) -> Column:
    computing = plan.choice.prefill_pod or plan.choice.pod
    status = scene.fleet.find(computing)
    return Column(plan, tuple(_inputs(scene, policy, plan.choice)), class_key(status.pod) if status else "")


def _inputs(scene: Scene, policy: Policy, choice: Choice) -> Iterator[Input]:
    """Every number that the policy's terms read, each once. In a split, an input of the decode pod that differs from
    that of the prefill pod is marked."""
    shown: dict[str, Input] = {}
    for side, at in placed(scene, choice, pulls=policy.pulls):
        prompt = () if side is Side.DECODE else prompt_inputs(at)
        for each in chain(prompt, *(term.inputs(at) for _, term in policy.costs_of(side))):
            if side is Side.DECODE and shown.get(each.name, each) != each:
                each = msgspec.structs.replace(each, name=each.name + ON_DECODE_POD)
            shown.setdefault(each.name, each)
    yield from shown.values()
