"""Which of the pods that may take a request does its policy look at?

Filters are preferences: one that leaves nobody who can serve leaves nobody out, unless it is strict. One after another,
in the order of the catalog. This file never prices anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from router.errors import NoReadyPod
from router.policy.eligible import Eligible, eligible
from router.policy.plans import prompt_token_count
from router.policy.spec import Policy
from router.policy.term import Filter
from router.types import PodId, Scene


class LeftOut(msgspec.Struct, frozen=True):
    """What a filter did to one request: whom it left out; nobody, where all would have gone and all stayed
    (`gave_way`)."""

    filter: str
    pods: tuple[PodId, ...]
    gave_way: bool = False


def narrowed(scene: Scene, pods: Eligible, policy: Policy) -> Eligible:
    """Those whom the policy's filters keep. Raises `NoReadyPod` where a strict one keeps nobody who can serve.
    O(pods * filters); without filters, the same pods."""
    for name, one in policy.filters:
        kept = _kept(pods, one)
        if _can_serve(kept, pods, policy):
            pods = kept
        elif one.strict:
            model = scene.request.adapter or scene.request.model
            raise NoReadyPod(
                f"The filter `{name}` of policy `{policy.name}` keeps no ready pod that can serve `{model}`."
            )
    return pods


def left_out(scene: Scene, policy: Policy) -> Iterator[LeftOut]:
    """What each filter that would leave somebody out did, in a request that was served."""
    if not policy.filters:
        return
    pods = eligible(scene, prompt_token_count(scene) if scene.prompt else 0)
    for name, one in policy.filters:
        kept = _kept(pods, one)
        gone = tuple(sorted(_ids(pods) - _ids(kept)))
        if _can_serve(kept, pods, policy):
            pods = kept
            if gone:
                yield LeftOut(name, gone)
        else:
            yield LeftOut(name, (), gave_way=True)


def _kept(pods: Eligible, one: Filter) -> Eligible:
    return Eligible(*([s for s in side if one.keeps(s)] for side in (pods.direct, pods.prefill, pods.decode)))


def _can_serve(kept: Eligible, pods: Eligible, policy: Policy) -> bool:
    """Whole or, where the policy splits, by two; and with a prefill pod where it insists on one and there is one."""
    if policy.on_no_prefill == "fail" and pods.prefill and not kept.prefill:
        return False
    return bool(kept.direct or (policy.splits and kept.prefill and kept.decode))


def _ids(pods: Eligible) -> set[PodId]:
    return {status.pod.id for side in (pods.direct, pods.prefill, pods.decode) for status in side}
