"""Which pods may take this request at all?

These are not preferences, so no policy can switch them off. This file never prices anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.errors import ContextTooLong, NoReadyPod, UnknownModel
from router.types import PodState, PodStatus, PrefixTrust, Role, Scene


def eligible(scene: Scene, prompt_tokens: int) -> list[PodStatus]:
    """Ready pods that serve the model and take a prompt of this length.

    Raises `UnknownModel`, `NoReadyPod` or `ContextTooLong`, whichever is the first to leave nothing.
    """
    model = scene.request.adapter or scene.request.model
    serving = [status for status in scene.fleet.pods if status.pod.serves(model)]
    if not serving:
        raise UnknownModel(f"The model `{model}` does not exist.", param="model")
    ready = [s for s in serving if s.state is PodState.READY and s.pod.role is not Role.PREFILL]
    if not ready:
        raise NoReadyPod(f"No pod that serves `{model}` is ready: {_states(serving)}.")
    fitting = [s for s in ready if s.pod.max_model_len_tokens is None or _takes(s, prompt_tokens)]
    if not fitting:
        longest = max(status.pod.max_model_len_tokens or 0 for status in ready)
        raise ContextTooLong(
            f"This model's maximum context length is {longest} tokens, but the prompt has {prompt_tokens}. "
            "Please shorten it.",
            param="messages" if scene.request.endpoint.name == "CHAT" else "prompt",
        )
    return _with_room_for_output(fitting, prompt_tokens + (scene.request.max_output_tokens or 1))


def _takes(status: PodStatus, prompt_tokens: int) -> bool:
    """A prompt must leave room for one token. Where our tokens are unproven, the engine itself may judge."""
    limit = status.pod.max_model_len_tokens
    return limit is None or prompt_tokens < limit or status.pod.trust is not PrefixTrust.TRUSTED


def _with_room_for_output(statuses: list[PodStatus], tokens: int) -> list[PodStatus]:
    """In a mixed pool, prefer pods where the asked-for output fits too; if none, let an engine answer."""
    roomy = [s for s in statuses if s.pod.max_model_len_tokens is None or tokens <= s.pod.max_model_len_tokens]
    return roomy or statuses


def _states(statuses: Iterable[PodStatus]) -> str:
    return ", ".join(f"{status.pod.id} is {status.state.value}" for status in statuses)
