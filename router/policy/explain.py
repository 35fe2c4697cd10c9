"""Why did this request go there?

A decision as a table that a person can recompute: of each candidate its parts in milliseconds and the numbers that
their formulas were given, with units. Everything is read off the recorded scene by the code that decided. This file
never decides, and never knows what came of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from math import floor, inf
from typing import Any, TypeAlias

import msgspec

from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.decision import Candidate, Split
from router.policy.ahead import step_under_way
from router.policy.decide import expected_ttft_ms
from router.policy.narrow import LeftOut, left_out
from router.policy.pickers import LowestCost
from router.policy.price import Choice, choice_of, placed
from router.policy.spec import Policy
from router.policy.term import CostTerm, Placement, Side, Transfer
from router.types import Link, Scene, Tier


class PricedPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A candidate in numbers. `ttft_ms`: of the total, what the client waits for."""

    choice: Choice
    parts: tuple[tuple[str, float], ...]
    total_ms: float
    ttft_ms: float
    cached_tokens: int = 0
    handoff_tokens: int = 0


class Input(msgspec.Struct, frozen=True):
    """One number that formulas were given."""

    name: str
    unit: str
    value: float


class Column(msgspec.Struct, frozen=True):
    """One candidate."""

    plan: PricedPlan
    inputs: tuple[Input, ...]


class TermNote(msgspec.Struct, frozen=True):
    """A cost term: its formula, and its parameters by the policy."""

    name: str
    formula: str
    parameters: dict[str, Any]


class Explanation(msgspec.Struct, frozen=True):
    """A decision, best candidates first; `candidate_count` is how many there were."""

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
    """The candidate in numbers."""
    plan, cost = candidate.plan, candidate.cost
    handoff_tokens = plan.handoff_tokens if isinstance(plan, Split) else 0
    return PricedPlan(
        choice_of(plan), cost.parts, cost.total_ms, expected_ttft_ms(cost), candidate.cached_tokens, handoff_tokens
    )


def explain(scene: Scene, policy: Policy, candidates: Sequence[Candidate], count: int, reason: str) -> Explanation:
    """The decision that `policy` made in `scene`: the first of `count` candidates. O(pods * candidates given)."""
    plans = [priced(candidate) for candidate in candidates]
    return Explanation(
        request_id=scene.request.id,
        model=scene.request.model,
        policy=policy.name,
        version=policy.version,
        reason=reason,
        why=_why(scene, policy, plans, count, reason),
        candidate_count=count,
        left_out=tuple(left_out(scene, policy)),
        terms=tuple(_note(name, term) for name, term in policy.costs),
        columns=tuple(Column(plan, tuple(_inputs(scene, policy, plan.choice))) for plan in plans),
    )


def in_hundredths(parts_ms: Sequence[float], total_ms: float) -> list[int]:
    """The parts in hundredths of a millisecond, which add up to the rounded total exactly.

    Each is its value rounded down or up; those that lose most by being cut are rounded up, as many as are missing."""
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
    """Its parts by name, in hundredths of a millisecond that add up."""
    cents = in_hundredths([ms for _, ms in plan.parts], plan.total_ms)
    return dict(zip((name for name, _ in plan.parts), cents, strict=True))


# --- one sentence ---


def _why(scene: Scene, policy: Policy, plans: Sequence[PricedPlan], count: int, reason: str) -> str:
    first = plans[0]
    prompt_tokens = scene.prompt.token_count if scene.prompt else None
    hit = (
        f" {first.cached_tokens:,} of {prompt_tokens:,} prompt tokens were expected in its cache."
        if prompt_tokens
        else " Its prompt was not read: n is guessed from the length of the body."
    )
    if count == 1:
        return f"Only {first.choice} could serve it.{hit}"
    return f"{first.choice}, by {reason}: {_against(policy, first, plans[1])}.{hit}"


def _against(policy: Policy, first: PricedPlan, second: PricedPlan) -> str:
    """As it is printed: what a reader subtracts must come out."""
    if not policy.costs:
        return "this policy goes by no price"
    ours, theirs = printed(first), printed(second)
    less_ms = (sum(theirs.values()) - sum(ours.values())) / 100
    if isinstance(policy.picker, LowestCost) and abs(less_ms) <= policy.picker.indifference_ms:
        within = f" within {policy.picker.indifference_ms:g} ms" if less_ms else ""
        return f"{second.choice} costs the same{within}, and the request's key decided"
    if less_ms == 0:
        return f"{second.choice} costs the same"
    if less_ms < 0:
        return f"{second.choice} is {-less_ms:,.2f} ms cheaper, but price is not all that this policy goes by"
    _, name = max((theirs.get(name, 0) - cents, name) for name, cents in ours.items())
    most = f"{name} ({ours[name] / 100:,.2f} against {theirs.get(name, 0) / 100:,.2f})"
    return f"{less_ms:,.2f} ms cheaper than {second.choice}, above all in {most}"


def _note(name: str, term: CostTerm) -> TermNote:
    return TermNote(name, _formula(inspect.getdoc(term) or ""), term.model_dump())


def _formula(doc: str) -> str:
    """The equations of a term's docstring, a line each: what is indented there, or else its first line."""
    lines = doc.splitlines()
    indented = [" ".join(line.split()) for line in lines if line.startswith("    ")]
    found = ""
    for line in indented or lines[:1]:
        found += ("\n" if " = " in line else " ") + line
    return found.strip()


# --- what the formulas were given ---

Row: TypeAlias = tuple[str, str, float]
"""Name, unit, value."""


def _inputs(scene: Scene, policy: Policy, choice: Choice) -> Iterator[Input]:
    """Those that the policy's terms read, of each side in turn; a term of which no group knows may read anything."""
    names = {name for name, _ in policy.costs}
    anything = not names <= KNOWN
    for side, at in placed(scene, choice):
        for of_side, readers, rows in GROUPS:
            if side in (None, of_side) and (anything or not readers or readers & names):
                yield from (Input(*row) for row in rows(scene, at))


def _prompt(_scene: Scene, at: Placement) -> Iterator[Row]:
    yield "n", "prompt tokens", at.prompt_tokens
    yield "p", "cached tokens", at.cached_tokens


def _held(_scene: Scene, at: Placement) -> Iterator[Row]:
    for tier in Tier:
        yield f"held in {tier.name.lower()}", "tokens", at.held_tokens[tier]
    yield "shared by traffic", "tokens", at.shared_tokens


def _speed(_scene: Scene, at: Placement) -> Iterator[Row]:
    speed = at.pod.speed
    yield "F", "ms", at.fixed_ms
    yield "c1", "ms/token", speed.c1_ms_per_token
    yield "c2", "ms/token²", speed.c2_ms_per_token2


def _queue(_scene: Scene, at: Placement) -> Iterator[Row]:
    work = at.inflight
    yield "W_in + W_behind", "ms", work.prefill_ms
    if under_way := step_under_way(at):
        began_s, inside_ms = under_way
        elapsed_ms = (at.now_s - began_s) * 1000 if began_s > -inf else (at.fixed_ms + inside_ms) / 2
        yield "W_in", "ms", inside_ms
        yield "time since step began", "ms", elapsed_ms
    yield "waiting at engine", "requests", at.load.waiting
    yield "our prompts then", "requests", at.load.our_prompts


def _tiers(_scene: Scene, at: Placement) -> Iterator[Row]:
    for tier, link in ((Tier.CPU, at.links.cpu), (Tier.DISK, at.links.disk), (Tier.REMOTE, at.links.remote)):
        if at.held_tokens[tier] and link:
            yield from _link(f"{tier.name.lower()} tier", link)


def _pull(scene: Scene, at: Placement) -> Iterator[Row]:
    if at.pull:
        yield from _moved(scene, at, "pull", at.pull, at.cached_tokens - at.own_tokens)


def _handoff(scene: Scene, at: Placement) -> Iterator[Row]:
    if at.handoff:
        yield from _moved(scene, at, "handoff", at.handoff, at.prompt_tokens - at.own_tokens)
        yield "handoff hides behind", "ms", at.handoff.prefill_ms


def _moved(scene: Scene, at: Placement, what: str, transfer: Transfer, tokens: int) -> Iterator[Row]:
    yield f"{what} of", "tokens", tokens
    yield "kv_bytes_per_token", "bytes", at.pod.kv_bytes_per_token
    link = at.links.between(transfer.sender, at.pod)
    yield from _link(what, link) if link else ()
    busy = scene.inflight.get(transfer.sender.id)
    yield f"{what} beside", "transfers", busy.pulls if busy else 0


def _link(what: str, link: Link) -> Iterator[Row]:
    yield f"{what} t0", "ms", link.t0_ms
    yield f"{what} B", "GB/s", link.bytes_per_ms / BYTES_PER_MS_PER_GB_PER_S


def _beside(_scene: Scene, at: Placement) -> Iterator[Row]:
    work = at.inflight
    yield "stalled by prompt", "requests", max(work.requests - work.prefill_requests, at.load.running)


def _decoding(_scene: Scene, at: Placement) -> Iterator[Row]:
    work, speed = at.inflight, at.pod.speed
    yield "expected output", "tokens", at.output_tokens
    yield "running", "requests", max(at.load.running, work.requests - work.prefill_requests)
    yield "context in flight", "tokens", work.context_tokens
    yield "d1", "ms/request", speed.d1_ms_per_request
    yield "d2", "ms/token", speed.d2_ms_per_context_token


def _room(_scene: Scene, at: Placement) -> Iterator[Row]:
    yield "d0", "ms", at.pod.speed.d0_ms
    yield "KV capacity", "tokens", at.capacity_tokens
    yield "KV in use", "share", at.load.kv_usage
    yield "prompts before it", "tokens", at.inflight.prefill_tokens


GROUPS: Sequence[tuple[Side, frozenset[str], Callable[[Scene, Placement], Iterator[Row]]]] = (
    (Side.PREFILL, frozenset(), _prompt),
    (Side.PREFILL, frozenset({"hot_prefix_credit", "eviction", "tier_read"}), _held),
    (Side.PREFILL, frozenset({"queue", "prefill", "hot_prefix_credit", "eviction", "decode_interference"}), _speed),
    (Side.PREFILL, frozenset({"queue", "transfer"}), _queue),
    (Side.PREFILL, frozenset({"tier_read"}), _tiers),
    (Side.PREFILL, frozenset({"transfer"}), _pull),
    (Side.PREFILL, frozenset({"decode_interference"}), _beside),
    (Side.DECODE, frozenset({"handoff"}), _handoff),
    (Side.DECODE, frozenset({"decode", "kv_wait"}), _decoding),
    (Side.DECODE, frozenset({"kv_wait"}), _room),
)
"""Which side reads them, which terms do (none: all), and what they are."""
KNOWN = frozenset[str]().union(*(readers for _, readers, _ in GROUPS))
