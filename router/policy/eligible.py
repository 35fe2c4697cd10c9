"""Which pods may serve this request?

First the hard conditions, which no policy can switch off: state, model, role and context length. Then the filters of
the policy, in the order of the catalog. A filter that would leave no usable pod is ignored unless it is strict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import msgspec

from router.errors import ContextTooLong, NoReadyPod
from router.policy.spec import Policy
from router.policy.term import Filter
from router.types import Endpoint, FleetSnapshot, InferenceRequest, PodId, PodState, PodStatus, Role, Scene

SNAPSHOTS = 64
"""Pairs of fleet snapshot and model whose pods are cached."""


@dataclass(frozen=True, slots=True)
class Eligible:
    """Ready pods that serve the model and accept a prompt of this length. `direct`: pods that may serve the request
    alone; `prefill` and `decode`: pods that may share it, if the fleet has pods of one role only."""

    direct: list[PodStatus]
    prefill: list[PodStatus]
    decode: list[PodStatus]

    @property
    def can_serve(self) -> bool:
        return bool(self.direct or (self.prefill and self.decode))


@dataclass(frozen=True, slots=True)
class _Serving:
    """Ready pods of one model. `of_all`: the eligible pods of a prompt whose length with its output is at most
    `min_context_tokens`, so that it fits every pod."""

    ready: list[PodStatus]
    answering: list[PodStatus]
    has_roles: bool
    min_context_tokens: float
    of_all: Eligible


def eligible(scene: Scene, prompt_tokens: int) -> Eligible:
    """The eligible pods by role. O(1) for a prompt that fits every pod (O(pods) once per snapshot), else O(pods).

    Raises `NoReadyPod` or `ContextTooLong`, in this order.
    """
    model, output_tokens = scene.request.adapter or scene.request.model, scene.request.max_output_tokens or 1
    serving = _serving(scene.fleet, model)
    if not serving.answering:
        raise _no_pod(scene, model)
    if prompt_tokens + output_tokens <= serving.min_context_tokens:
        found = serving.of_all
    else:
        endpoint = scene.request.endpoint
        fitting = _fitting(serving.answering, prompt_tokens, output_tokens, endpoint)
        if not fitting:
            raise _too_long(scene, serving.answering, prompt_tokens)
        found = _roles(fitting, [s for s in serving.ready if _fits(s, prompt_tokens, endpoint)], serving.has_roles)
    if not found.direct and not found.prefill:
        raise NoReadyPod(f"No ready prefill pod serves `{model}`, and no other pod serves it alone.")
    return found


def ready_pods(fleet: FleetSnapshot, model: str) -> Eligible:
    """The eligible pods of a prompt that fits every pod; none if no pod is ready. O(1) but once per snapshot."""
    return _serving(fleet, model).of_all


@lru_cache(maxsize=SNAPSHOTS)
def _serving(fleet: FleetSnapshot, model: str) -> _Serving:
    ready = [s for s in fleet.pods if s.state is PodState.READY and s.pod.serves(model)]
    has_roles = {s.pod.role for s in ready} != {Role.BOTH}
    answering = [s for s in ready if s.pod.role is not Role.PREFILL]
    limits = [s.pod.max_model_len_tokens for s in ready]
    min_context_tokens = min((limit for limit in limits if limit is not None), default=inf)
    return _Serving(ready, answering, has_roles, min_context_tokens, _roles(answering, ready, has_roles))


def _roles(answering: list[PodStatus], prefilling: list[PodStatus], has_roles: bool) -> Eligible:
    if not has_roles:
        return Eligible(answering, [], [])
    prefill = [s for s in prefilling if s.pod.role is not Role.DECODE and s.pod.handoff]
    return Eligible([s for s in answering if s.pod.serves_alone], prefill, [s for s in answering if s.pod.handoff])


def context_tokens(fleet: FleetSnapshot, request: InferenceRequest) -> int | None:
    """The longest context of the ready pods that serve the request's model; None if a pod does not report it, or counts
    tokens differently."""
    limits = [
        s.pod.max_model_len_tokens if s.pod.reads_alike(request.endpoint) else None
        for s in _serving(fleet, request.adapter or request.model).answering
        if request.endpoint not in s.pod.lacks
    ]
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def _fitting(statuses: list[PodStatus], prompt_tokens: int, output_tokens: int, endpoint: Endpoint) -> list[PodStatus]:
    """The pods that the prompt and the requested output fit; if there are none, those that the prompt fits."""
    tokens = prompt_tokens + output_tokens
    fitting = [s for s in statuses if (limit := s.pod.max_model_len_tokens) is None or tokens <= limit]
    return fitting or [s for s in statuses if _fits(s, prompt_tokens, endpoint)]


def _no_pod(scene: Scene, model: str) -> NoReadyPod:
    serving = [status for status in scene.fleet.pods if status.pod.serves(model)]
    if not serving:
        return NoReadyPod(f"No pod that serves `{model}` is known; retry later.")
    states = ", ".join(f"{status.pod.id} is {status.state.value}" for status in serving)
    return NoReadyPod(f"No pod that serves `{model}` is ready: {states}.")


def _too_long(scene: Scene, statuses: list[PodStatus], prompt_tokens: int) -> ContextTooLong:
    longest = max(status.pod.max_model_len_tokens or 0 for status in statuses)
    return ContextTooLong(
        f"This model's maximum context length is {longest} tokens, but the prompt has {prompt_tokens}. "
        "Please shorten it.",
        param=scene.request.endpoint.api.length_field,
    )


def _fits(status: PodStatus, prompt_tokens: int, endpoint: Endpoint) -> bool:
    """Whether the prompt leaves space for one output token. An engine that may count other tokens checks it itself."""
    limit = status.pod.max_model_len_tokens
    return limit is None or prompt_tokens < limit or not status.pod.reads_alike(endpoint)


# --- filters ---


class LeftOut(msgspec.Struct, frozen=True):
    """The pods that a filter excluded for one request; none if it was ignored (`ignored`) because no usable pod would
    have been left."""

    filter: str
    pods: tuple[PodId, ...]
    ignored: bool = False


def filtered(scene: Scene, pods: Eligible, policy: Policy) -> Eligible:
    """The pods that pass the policy's filters. Raises `NoReadyPod` if a strict filter leaves no usable pod.
    O(pods * filters)."""
    for name, each in policy.filters:
        kept = _kept(pods, each)
        if _can_serve(kept, pods, policy):
            pods = kept
        elif each.strict:
            model = scene.request.adapter or scene.request.model
            raise NoReadyPod(
                f"The filter `{name}` of policy `{policy.name}` keeps no ready pod that can serve `{model}`."
            )
    return pods


def left_out(scene: Scene, policy: Policy) -> Iterator[LeftOut]:
    """The effect of each filter that excluded pods, or was ignored, for a request that was served."""
    if not policy.filters:
        return
    pods = eligible(scene, len(scene.prompt.tokens) if scene.prompt else 0)
    for name, each in policy.filters:
        kept = _kept(pods, each)
        gone = tuple(sorted(_ids(pods) - _ids(kept)))
        if _can_serve(kept, pods, policy):
            pods = kept
            if gone:
                yield LeftOut(name, gone)
        else:
            yield LeftOut(name, (), ignored=True)


def _kept(pods: Eligible, each: Filter) -> Eligible:
    return Eligible(*([s for s in side if each.keeps(s)] for side in (pods.direct, pods.prefill, pods.decode)))


def _can_serve(kept: Eligible, pods: Eligible, policy: Policy) -> bool:
    """Whether a pod, or a pair if the policy splits, can serve the request; with a prefill pod if the policy requires
    one."""
    if policy.on_no_prefill == "fail" and pods.prefill and not kept.prefill:
        return False
    return bool(kept.direct or (policy.splits and kept.prefill and kept.decode))


def _ids(pods: Eligible) -> set[PodId]:
    return {status.pod.id for side in (pods.direct, pods.prefill, pods.decode) for status in side}
