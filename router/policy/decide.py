"""Where should this request go, and why?

The centre of the project: a pure function from a scene to a ranked list of priced candidates. The proxy, the simulator
and the tests call this function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress

from router.decision import Candidate, Cost, Direct, Pull, RouteDecision
from router.errors import NoReadyPod
from router.policy.catalog import DELAYS
from router.policy.eligible import eligible, filtered
from router.policy.plans import (
    BYTES_PER_TOKEN,
    Planner,
    expected_cached_tokens,
    most_promising,
    prompt_token_count,
    unread_tokens,
)
from router.policy.spec import Policy
from router.policy.split import split_candidates
from router.policy.term import Placement, prices_ms
from router.types import Pod, PodId, PodStatus, Scene

__all__ = [
    "BYTES_PER_TOKEN",
    "decide",
    "expected_cached_tokens",
    "expected_ttft_ms",
    "prompt_token_count",
    "unread_tokens",
]


def decide(scene: Scene, policy: Policy) -> RouteDecision:
    """The candidate plans for the request, best first, with their costs in milliseconds.

    Raises `UnknownModel`, `NoReadyPod` or `ContextTooLong`. O(pods of the model + shortlist * cost terms).
    """
    prompt_tokens = prompt_token_count(scene)
    planner = Planner(scene, prompt_tokens)
    pods = filtered(scene, eligible(scene, len(scene.prompt.tokens) if scene.prompt else 0), policy)
    splitting = policy.splits and bool(pods.prefill)
    direct = planner.placements(_shortlisted(planner, pods.direct, policy, splitting))
    candidates = _priced(direct, policy)
    if policy.pulls and (pulling := planner.pulling(direct)):
        candidates = _cheapest_of_each_pod([*candidates, *_priced(pulling, policy)])
    if policy.splits:
        candidates += split_candidates(planner, pods, policy)
    if not candidates:
        raise NoReadyPod(f"No two ready pods of `{scene.request.model}` can hand KV over to each other.")
    ranked, reason = policy.picker.rank(scene, candidates)
    return RouteDecision(policy.name, policy.version, tuple(ranked), reason)


def expected_ttft_ms(cost: Cost) -> float:
    """The part of a cost that is time until the first token."""
    return sum(compress(cost.parts_ms, _delaying(cost.names)))


@lru_cache(maxsize=256)
def _delaying(names: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(name in DELAYS for name in names)


def _shortlisted(
    planner: Planner, statuses: Sequence[PodStatus], policy: Policy, splitting: bool
) -> Sequence[PodStatus]:
    """The most promising pods, which alone are priced in full; a third as many if splits are priced as well."""
    limit = policy.shortlist // 3 if splitting else policy.shortlist
    if not 0 < limit < len(statuses):
        return statuses
    weight = planner.missing_weight(statuses[0].pod, policy.costs)
    return most_promising(planner.scene, statuses, planner.prompt_tokens, limit, weight)


def _priced(placements: Sequence[Placement], policy: Policy) -> list[Candidate]:
    names = policy.cost_names
    return [
        Candidate(
            Direct(at.pod, _pull(at.pull.sender, at) if at.pull else None),
            Cost(names, parts_ms, sum(parts_ms)),
            at.cached_tokens,
        )
        for at, parts_ms in zip(placements, prices_ms(placements, policy.costs), strict=True)
    ]


def _pull(sender: Pod, at: Placement) -> Pull:
    return Pull(sender.id, at.cached_tokens, at.cached_tokens - at.own_tokens)


def _cheapest_of_each_pod(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One candidate per pod: with or without a pull."""
    best: dict[PodId, Candidate] = {}
    for candidate in candidates:
        pod_id = candidate.plan.pod.id
        known = best.get(pod_id)
        if known is None or candidate.cost.total_ms < known.cost.total_ms:
            best[pod_id] = candidate
    return list(best.values())
