"""The record of a fleet's measurement: its requests, and what the router knew. Values only."""

from __future__ import annotations

from typing import Any

import msgspec

from router.types import PodSpeed


class MeasuredRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One answered request. Times are in ms since it was sent, `sent_s` since the start of the load.

    `blocks` are numbers, not hashes: equal numbers are equal prefixes. They cover the prompt and its answer.
    """

    kind: str
    sent_s: float
    late_ms: float
    """Time between due and sent: the lateness of the client itself."""
    pod: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """As the engine reported."""
    predicted_cached_tokens: int | None
    """By the router."""
    ttft_ms: float
    """As the client measured."""
    e2e_ms: float
    expected_ttft_ms: float | None
    """By the router, when it decided."""
    router_ttft_ms: float | None
    """As the router measured."""
    router_phases_ms: dict[str, float]
    tokens_agree: bool
    """Whether our tokens of prompt and answer are as many as the engine's."""
    blocks: list[int]


class MeasuredFleet(msgspec.Struct, kw_only=True, frozen=True):
    """One run of the load. `prior`: the speed that the router started with."""

    pods: int
    plan: dict[str, Any]
    prior: PodSpeed
    block_size_tokens: int
    caches_cleared: bool
    planned_requests: int
    unfinished_sessions: int
    """Sessions that the deadline ended."""
    error: str
    request_errors: dict[str, int]
    """Failed requests by error."""
    calibration: dict[str, dict[str, float]]
    """What the router had learnt at the end."""
    requests: list[MeasuredRequest]


def read_fleet(found: Any) -> MeasuredFleet:
    """The record of these JSON values. Raises `msgspec.ValidationError`."""
    return msgspec.convert(found, MeasuredFleet)
