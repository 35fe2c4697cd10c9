"""Where should this request go, and why?

The centre of the project: a pure function from a scene to a ranked list of priced candidates. The live proxy, the
simulator and the tests call this very function. It never waits, draws a random number or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress, repeat
from typing import TypeAlias

from router.decision import Candidate, Cost, Direct, Pull, RouteDecision
from router.errors import NoReadyPod
from router.policy.catalog import DELAYS
from router.policy.eligible import eligible
from router.policy.narrow import narrowed
from router.policy.plans import BYTES_PER_TOKEN, Planner, expected_cached_tokens, most_promising, prompt_token_count
from router.policy.spec import Policy
from router.policy.split import split_candidates
from router.policy.term import Costs, Placement
from router.types import Pod, PodStatus, Scene

Prices: TypeAlias = tuple[float, ...]
"""One for each term, in milliseconds."""

__all__ = ["BYTES_PER_TOKEN", "decide", "expected_cached_tokens", "expected_ttft_ms", "prompt_token_count"]


def decide(scene: Scene, policy: Policy) -> RouteDecision:
    """Every way to serve it that is worth a look, best first, with its price in milliseconds.

    Raises `UnknownModel`, `NoReadyPod` or `ContextTooLong`. O(pods of the model + shortlist * cost terms).
    """
    prompt_tokens = prompt_token_count(scene)
    planner = Planner(scene, prompt_tokens)
    pods = narrowed(scene, eligible(scene, prompt_tokens if scene.prompt else 0), policy)
    splitting = policy.splits and bool(pods.prefill)
    direct = planner.placements(_shortlisted(planner, pods.direct, policy, splitting))
    if policy.pulls:
        direct += planner.pulling(direct)
    candidates = _cheapest_of_each_pod(direct, policy.costs)
    if policy.splits:
        candidates += split_candidates(planner, pods, policy)
    if not candidates:
        raise NoReadyPod(f"No pods of `{scene.request.model}` that are ready can hand KV to one another.")
    ranked, reason = policy.picker.rank(scene, candidates)
    return RouteDecision(policy.name, policy.version, tuple(ranked), reason)


def expected_ttft_ms(cost: Cost) -> float:
    """Of a price, the part that the client waits for."""
    return sum(compress(cost.parts_ms, _delaying(cost.names)))


@lru_cache
def _delaying(names: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(name in DELAYS for name in names)


def _shortlisted(
    planner: Planner, statuses: Sequence[PodStatus], policy: Policy, splitting: bool
) -> Sequence[PodStatus]:
    """In a large fleet only the most promising are priced in full; a third as many where splits are priced beside."""
    most = policy.shortlist // 3 if splitting else policy.shortlist
    if not 0 < most < len(statuses):
        return statuses
    weight = planner.missing_weight(statuses[0].pod, policy.costs)
    return most_promising(planner.scene, statuses, planner.prompt_tokens, most, weight)


def _prices(placements: Sequence[Placement], costs: Costs) -> Iterable[Prices]:
    """Term by term over all placements: half the price of going pod by pod."""
    columns = [list(map(term.cost_ms, placements)) for _, term in costs]
    return zip(*columns, strict=True) if columns else repeat((), len(placements))


def _pull(sender: Pod, at: Placement) -> Pull:
    return Pull(sender.id, at.cached_tokens, at.cached_tokens - at.own_tokens)


def _cheapest_of_each_pod(placements: Sequence[Placement], costs: Costs) -> list[Candidate]:
    """Of each pod its own way, or the pull that is cheaper."""
    best: dict[str, tuple[float, Prices, Placement]] = {}
    for at, prices in zip(placements, _prices(placements, costs), strict=True):
        total_ms, known = sum(prices), best.get(at.pod.id)
        if known is None or total_ms < known[0]:
            best[at.pod.id] = total_ms, prices, at
    names = tuple([name for name, _ in costs])
    return [
        Candidate(
            Direct(at.pod, _pull(at.pull.sender, at) if at.pull else None),
            Cost(names, prices, total_ms),
            at.cached_tokens,
        )
        for total_ms, prices, at in best.values()
    ]
