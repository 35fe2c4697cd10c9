"""Where should this request go, and why?

The centre of the project: a pure function from a scene to a ranked list of priced candidates. The proxy, the simulator
and the tests call this function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress
from typing import TypeAlias

from router.decision import Candidate, Cost, Direct, Pull, RouteDecision, Split
from router.errors import NoReadyPod
from router.policy.catalog import DELAYS
from router.policy.eligible import Eligible, eligible, filtered
from router.policy.plans import Planner, prompt_token_count
from router.policy.spec import Policy
from router.policy.term import Costs, Placement, Side, prices_ms
from router.types import Pod, PodId, PodStatus, Role, Scene


def decide(scene: Scene, policy: Policy) -> RouteDecision:
    """The candidate plans for the request, best first, with their costs in milliseconds.

    Raises `NoReadyPod` or `ContextTooLong`. O(pods of the model + shortlist * cost terms).
    """
    prompt_tokens = prompt_token_count(scene)
    planner = Planner(scene, prompt_tokens)
    pods = filtered(scene, eligible(scene, len(scene.prompt.tokens) if scene.prompt else 0), policy)
    splitting = policy.splits and bool(pods.prefill)
    # The most promising pods alone are priced in full; a third as many if splits are priced as well.
    limit = policy.shortlist // 3 if splitting else policy.shortlist
    direct = planner.placements(planner.most_promising(pods.direct, policy.costs, limit))
    priced = _priced(direct, policy.costs)
    if policy.pulls and (pulling := planner.pulling(direct)):
        priced = _cheapest_of_each_pod(chain(priced, _priced(pulling, policy.costs)))
    candidates = _direct_candidates(priced, policy)
    if policy.splits:
        candidates += _split_candidates(planner, pods, policy)
        candidates += _lent_candidates(planner, pods, policy, candidates)
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


_Priced: TypeAlias = tuple[Placement, tuple[float, ...]]


def _priced(placements: Sequence[Placement], costs: Costs) -> Iterable[_Priced]:
    return zip(placements, prices_ms(placements, costs), strict=True)


def _cheapest_of_each_pod(placements: Iterable[_Priced]) -> Iterable[_Priced]:
    """One per pod: with or without a pull."""
    best: dict[PodId, _Priced] = {}
    for at, parts_ms in placements:
        known = best.get(at.pod.id)
        if known is None or sum(parts_ms) < sum(known[1]):
            best[at.pod.id] = at, parts_ms
    return best.values()


def _direct_candidates(priced: Iterable[_Priced], policy: Policy) -> list[Candidate]:
    names = policy.cost_names
    return [
        Candidate(
            Direct(at.pod, _pull_of(at) if at.pull else None),
            Cost(names, parts_ms, sum(parts_ms)),
            at.cached_tokens,
        )
        for at, parts_ms in priced
    ]


MAX_PODS_PER_SIDE = 3


def _split_candidates(planner: Planner, pods: Eligible, policy: Policy) -> list[Candidate]:
    """The best pairs with their costs. Raises `NoReadyPod` without a prefill pod if the policy requires one."""
    scene = planner.scene
    if not pods.prefill and policy.on_no_prefill == "fail" and any(s.pod.role is Role.DECODE for s in pods.direct):
        raise NoReadyPod(f"No ready prefill pod serves `{scene.request.model}`.")
    if not pods.prefill or not pods.decode:
        return []
    found = _pairs(planner, pods, policy)
    if found:
        return found
    # The best of both sides are incompatible, for example during an upgrade: other pods may be compatible.
    return [pair for kind in _of_one_kind(pods) for pair in _pairs(planner, kind, policy)]


def _lent_candidates(planner: Planner, pods: Eligible, policy: Policy, others: Sequence[Candidate]) -> list[Candidate]:
    """Answers of prefill pods alone, while the cheapest of the others waits for the KV of a decode pod."""
    if "kv_wait" not in policy.cost_names or not others:
        return []
    cheapest = min(others, key=lambda candidate: candidate.cost.total_ms)
    if not dict(cheapest.cost.parts)["kv_wait"]:
        return []
    able = [status for status in pods.prefill if status.pod.role is Role.PREFILL and status.pod.serves_alone]
    chosen = planner.most_promising(able, policy.costs, MAX_PODS_PER_SIDE)
    return _direct_candidates(_priced(planner.placements(chosen), policy.costs), policy) if chosen else []


def _pairs(planner: Planner, pods: Eligible, policy: Policy) -> list[Candidate]:
    prefill_costs, decode_costs = policy.costs_of(Side.PREFILL), policy.costs_of(Side.DECODE)
    first = planner.placements(planner.most_promising(pods.prefill, policy.costs, MAX_PODS_PER_SIDE))
    second = planner.placements(_least_decoding(planner.scene, pods.decode))
    if policy.pulls:
        first = [*first, *planner.pulling([at for at in first if at.pod.pulls == at.pod.handoff])]
    priced = _cheapest_of_each_pod(_priced(first, prefill_costs))
    pairs = [
        (one, parts_ms, receiving)
        for one, parts_ms in priced
        for other in second
        if compatible(one.pod, other.pod) and (receiving := planner.receiving(one, other))
    ]
    prices = prices_ms([receiving for _, _, receiving in pairs], decode_costs)
    names = tuple([name for name, _ in (*prefill_costs, *decode_costs)])
    return [
        Candidate(
            Split(one.pod, other.pod, other.handoff.tokens if other.handoff else 0, _pull_of(one)),
            Cost(names, prefill_ms + decode_ms, sum(prefill_ms + decode_ms)),
            one.cached_tokens,
        )
        for (one, prefill_ms, other), decode_ms in zip(pairs, prices, strict=True)
    ]


def _pull_of(at: Placement) -> Pull | None:
    return Pull(at.pull.sender.id, at.cached_tokens, at.cached_tokens - at.own_tokens) if at.pull else None


def _of_one_kind(pods: Eligible) -> Iterator[Eligible]:
    """The pods of each engine, version, front end and dialect that has both sides."""
    kinds = {_kind(status.pod) for status in pods.prefill} & {_kind(status.pod) for status in pods.decode}
    for kind in sorted(kinds):
        prefill, decode = ([s for s in side if _kind(s.pod) == kind] for side in (pods.prefill, pods.decode))
        yield Eligible(pods.direct, prefill, decode)


def _kind(pod: Pod) -> tuple[str, ...]:
    return pod.handoff, pod.engine, pod.version, pod.front_end


def compatible(prefill: Pod, decode: Pod) -> bool:
    """Whether one pod can use the other's KV: same engine, version, front end and dialect."""
    return prefill.id != decode.id and _kind(prefill) == _kind(decode)


def _least_decoding(scene: Scene, statuses: Sequence[PodStatus]) -> list[PodStatus]:
    """By context in flight, then by KV usage; equal ones in turn."""
    inflight, first = scene.inflight.get, scene.turn % len(statuses)
    statuses = [*statuses[first:], *statuses[:first]]
    busy = [
        (work.context_tokens if (work := inflight(status.pod.id)) else 0, status.load.kv_usage) for status in statuses
    ]
    return [statuses[at] for at in sorted(range(len(busy)), key=busy.__getitem__)[:MAX_PODS_PER_SIDE]]
