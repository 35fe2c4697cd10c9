"""One request on one pod, as cost terms see it."""

from __future__ import annotations

from typing import Any

from router.policy.term import Placement
from router.types import InFlight, Links, PodLoad, StepBegan
from tests.policy.scenes import SPEED, pod

KV_BYTES = 1000
"""A token."""


def at(**facts: Any) -> Placement:
    """All that is cached is its own and on the GPU, if nothing else is said."""
    own_tokens = facts.get("own_tokens", facts.get("cached_tokens", 0))
    speed, work = facts.pop("speed", SPEED), facts.get("inflight", InFlight())
    our_decodes = work.decode_requests
    usual: dict[str, Any] = {
        "pod": pod("a", speed=speed, kv_bytes_per_token=KV_BYTES),
        "load": PodLoad(),
        "inflight": InFlight(),
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "shared_tokens": 0,
        "output_tokens": 100,
        "now_s": 0.0,
        "links": Links(),
        "own_tokens": own_tokens,
        "held_tokens": (own_tokens, 0, 0, 0),
        "capacity_tokens": 0,
        "fixed_ms": speed.fixed_ms(our_decodes, work.decode_tokens),
        "step": StepBegan(),
        "decoding_requests": max(our_decodes, facts.get("load", PodLoad()).running),
    }
    return Placement(**(usual | facts))
