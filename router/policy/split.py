"""Prices the pairs of pods that can share a request: one computes the prompt, the other the answer.

A pair is one plan: the prefill terms on one pod, the decode terms on the other, with the handoff between them. Only the
best few pods of each side are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.decision import Candidate, Cost, Split
from router.errors import NoReadyPod
from router.policy.eligible import Eligible
from router.policy.plans import Planner, most_promising
from router.policy.spec import Policy
from router.policy.term import Costs, Side, prices_ms
from router.types import Pod, PodStatus, Role, Scene

MAX_PODS_PER_SIDE = 3


def split_candidates(planner: Planner, pods: Eligible, policy: Policy) -> list[Candidate]:
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


def _pairs(planner: Planner, pods: Eligible, policy: Policy) -> list[Candidate]:
    """The compatible pairs of the best pods of each side."""
    prefill_costs, decode_costs = policy.costs_of(Side.PREFILL), policy.costs_of(Side.DECODE)
    first = planner.placements(_cheapest_prefills(planner, pods.prefill, policy.costs))
    second = planner.placements(_least_decoding(planner.scene, pods.decode))
    pairs = [
        (one, parts_ms, receiving)
        for one, parts_ms in zip(first, prices_ms(first, prefill_costs), strict=True)
        for other in second
        if compatible(one.pod, other.pod) and (receiving := planner.receiving(one, other))
    ]
    prices = prices_ms([receiving for _, _, receiving in pairs], decode_costs)
    names = tuple([name for name, _ in (*prefill_costs, *decode_costs)])
    return [
        Candidate(
            Split(one.pod, other.pod, other.request.prompt_tokens - other.own_tokens),
            Cost(names, prefill_ms + decode_ms, sum(prefill_ms + decode_ms)),
            one.cached_tokens,
        )
        for (one, prefill_ms, other), decode_ms in zip(pairs, prices, strict=True)
    ]


def _of_one_kind(pods: Eligible) -> Iterator[Eligible]:
    """The pods of each engine, version and dialect that has both sides."""
    kinds = {_kind(status.pod) for status in pods.prefill} & {_kind(status.pod) for status in pods.decode}
    for kind in sorted(kinds):
        prefill, decode = ([s for s in side if _kind(s.pod) == kind] for side in (pods.prefill, pods.decode))
        yield Eligible(pods.direct, prefill, decode)


def _kind(pod: Pod) -> tuple[str, str, str]:
    return pod.handoff, pod.engine, pod.version


def compatible(prefill: Pod, decode: Pod) -> bool:
    """Whether one pod can use the other's KV: same engine, version and dialect."""
    return prefill.id != decode.id and _kind(prefill) == _kind(decode)


def _cheapest_prefills(planner: Planner, statuses: Sequence[PodStatus], costs: Costs) -> Sequence[PodStatus]:
    """By queue and uncached prompt, with the weight that these terms give to it."""
    weight = planner.missing_weight(statuses[0].pod, costs)
    return most_promising(planner.scene, statuses, planner.prompt_tokens, MAX_PODS_PER_SIDE, weight)


def _least_decoding(scene: Scene, statuses: Sequence[PodStatus]) -> list[PodStatus]:
    """By context in flight, then by KV usage."""
    inflight = scene.inflight.get
    busy = [
        (work.context_tokens if (work := inflight(status.pod.id)) else 0, status.load.kv_usage) for status in statuses
    ]
    return [statuses[at] for at in sorted(range(len(busy)), key=busy.__getitem__)[:MAX_PODS_PER_SIDE]]
