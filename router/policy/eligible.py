"""Which pods may take this request at all?

These are not preferences, so no policy can switch them off; those are `filters`. This file never prices anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from router.errors import ContextTooLong, NoReadyPod, UnknownModel
from router.types import FleetSnapshot, PodState, PodStatus, PrefixTrust, Role, Scene

SNAPSHOTS = 64
"""Pairs of fleet snapshot and model whose pods are cached."""


@dataclass(frozen=True, slots=True)
class Eligible:
    """Ready pods that serve the model and take a prompt of this length. `direct`: those that may serve it whole;
    `prefill` and `decode`: those that may share it, where the fleet has pods for one of both."""

    direct: list[PodStatus]
    prefill: list[PodStatus]
    decode: list[PodStatus]


@dataclass(frozen=True, slots=True)
class _Serving:
    """Who serves a model at all. `of_all`: who may take a prompt that every one of them has room for, which are those
    of up to `room_tokens` with their answer."""

    ready: list[PodStatus]
    answering: list[PodStatus]
    apart: bool
    room_tokens: float
    of_all: Eligible


def eligible(scene: Scene, prompt_tokens: int) -> Eligible:
    """Who may do what. O(1) for a prompt that fits everywhere, but for the first of a snapshot; else O(pods).

    Raises `UnknownModel`, `NoReadyPod` or `ContextTooLong`, whichever is the first to leave nobody who could answer.
    """
    model, output_tokens = scene.request.adapter or scene.request.model, scene.request.max_output_tokens or 1
    serving = _serving(scene.fleet, model)
    if not serving.answering:
        raise _nobody(scene, model)
    if prompt_tokens + output_tokens <= serving.room_tokens:
        found = serving.of_all
    else:
        roomy = _with_room(serving.answering, prompt_tokens, output_tokens)
        if not roomy:
            raise _too_long(scene, serving.answering, prompt_tokens)
        found = _roles(roomy, [s for s in serving.ready if _takes(s, prompt_tokens)], serving.apart)
    if not found.direct and not found.prefill:
        raise NoReadyPod(f"No prefill pod that serves `{model}` is ready, and no other serves alone.")
    return found


@lru_cache(maxsize=SNAPSHOTS)
def _serving(fleet: FleetSnapshot, model: str) -> _Serving:
    ready = [s for s in fleet.pods if s.state is PodState.READY and s.pod.serves(model)]
    apart = {s.pod.role for s in ready} != {Role.BOTH}
    answering = [s for s in ready if s.pod.role is not Role.PREFILL]
    limits = [s.pod.max_model_len_tokens for s in ready]
    room_tokens = min((limit for limit in limits if limit is not None), default=inf)
    return _Serving(ready, answering, apart, room_tokens, _roles(answering, ready, apart))


def _roles(answering: list[PodStatus], taking: list[PodStatus], apart: bool) -> Eligible:
    if not apart:
        return Eligible(answering, [], [])
    prefill = [s for s in taking if s.pod.role is not Role.DECODE and s.pod.handoff]
    return Eligible([s for s in answering if s.pod.serves_alone], prefill, [s for s in answering if s.pod.handoff])


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
