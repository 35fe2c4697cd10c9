"""Which pods may take this request at all?

These are not preferences, so no policy can switch them off; those are `filters`. This file never prices anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.errors import ContextTooLong, NoReadyPod, UnknownModel
from router.types import PodState, PodStatus, PrefixTrust, Role, Scene


@dataclass(frozen=True, slots=True)
class Eligible:
    """Ready pods that serve the model and take a prompt of this length. `direct`: those that may serve it whole;
    `prefill` and `decode`: those that may share it, where the fleet has pods for one of both."""

    direct: list[PodStatus]
    prefill: list[PodStatus]
    decode: list[PodStatus]


def eligible(scene: Scene, prompt_tokens: int) -> Eligible:
    """Who may do what. O(pods).

    Raises `UnknownModel`, `NoReadyPod` or `ContextTooLong`, whichever is the first to leave nobody who could answer.
    """
    model, is_ready, both = scene.request.adapter or scene.request.model, PodState.READY, Role.BOTH
    ready = [
        status
        for status in scene.fleet.pods
        if status.state is is_ready and (model in (pod := status.pod).models or model in pod.adapters)
    ]
    apart = {status.pod.role for status in ready} != {both}
    answering = [s for s in ready if s.pod.role is not Role.PREFILL] if apart else ready
    if not answering:
        raise _nobody(scene, model)
    roomy = _with_room(answering, prompt_tokens, scene.request.max_output_tokens or 1)
    if not roomy:
        raise _too_long(scene, answering, prompt_tokens)
    if not apart:
        return Eligible(roomy, [], [])
    direct = [s for s in roomy if s.pod.serves_alone]
    decodes = Role.DECODE
    prefill = [s for s in ready if s.pod.role is not decodes and s.pod.handoff and _takes(s, prompt_tokens)]
    if not direct and not prefill:
        raise NoReadyPod(f"No prefill pod that serves `{model}` is ready, and no other serves alone.")
    return Eligible(direct, prefill, [s for s in roomy if s.pod.handoff])


def _with_room(statuses: list[PodStatus], prompt_tokens: int, output_tokens: int) -> list[PodStatus]:
    """Where the prompt fits. In a mixed pool, pods where the asked-for output fits too are preferred; if there are
    none, let an engine answer."""
    tokens = prompt_tokens + output_tokens
    roomy = [s for s in statuses if (limit := s.pod.max_model_len_tokens) is None or tokens <= limit]
    return roomy or [s for s in statuses if _takes(s, prompt_tokens)]


def _nobody(scene: Scene, model: str) -> UnknownModel | NoReadyPod:
    serving = [status for status in scene.fleet.pods if status.pod.serves(model)]
    if not serving:
        return UnknownModel(f"The model `{model}` does not exist.", param="model")
    return NoReadyPod(f"No pod that serves `{model}` is ready: {_states(serving)}.")


def _too_long(scene: Scene, statuses: list[PodStatus], prompt_tokens: int) -> ContextTooLong:
    longest = max(status.pod.max_model_len_tokens or 0 for status in statuses)
    return ContextTooLong(
        f"This model's maximum context length is {longest} tokens, but the prompt has {prompt_tokens}. "
        "Please shorten it.",
        param="messages" if scene.request.endpoint.name == "CHAT" else "prompt",
    )


def _takes(status: PodStatus, prompt_tokens: int) -> bool:
    """A prompt must leave room for one token. Where our tokens are unproven, the engine itself may judge."""
    limit = status.pod.max_model_len_tokens
    return limit is None or prompt_tokens < limit or status.pod.trust is not PrefixTrust.TRUSTED


def _states(statuses: Iterable[PodStatus]) -> str:
    return ", ".join(f"{status.pod.id} is {status.state.value}" for status in statuses)
