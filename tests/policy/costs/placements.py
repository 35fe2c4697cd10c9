"""One request on one pod, as cost terms see it."""

from __future__ import annotations

from typing import Any

from router.policy.term import Placement, RequestFacts
from router.policy.work_ahead import work_ahead_ms
from router.types import InFlight, Links, PodLoad, StepBegan
from tests.policy.scenes import SPEED, pod, scene

KV_BYTES = 1000
"""A token."""


def at(**facts: Any) -> Placement:
    """A placement with these facts of the request, the pod and the placement. Cached tokens are the pod's own and on
    its GPU by default."""
    request: dict[str, Any] = {
        "scene": scene(),
        "prompt_tokens": 1000,
        "output_tokens": 100,
        "now_s": 0.0,
        "links": Links(),
    }
    names = RequestFacts.__struct_fields__
    request |= {name: facts.pop(name) for name in names if name in facts}
    speed, work, load = facts.pop("speed", SPEED), facts.get("inflight", InFlight()), facts.get("load", PodLoad())
    capacity_tokens = facts.pop("capacity_tokens", None)
    own_tokens = facts.get("own_tokens", facts.get("cached_tokens", 0))
    fixed_ms = facts.setdefault("fixed_ms", speed.fixed_ms(work.decode_requests, work.decode_tokens))
    usual: dict[str, Any] = {
        "pod": pod("a", speed=speed, kv_bytes_per_token=KV_BYTES, capacity_tokens=capacity_tokens),
        "compute_ms": speed.compute_ms(facts.get("cached_tokens", 0), request["prompt_tokens"]),
        "own_tokens": own_tokens,
        "held_tokens": (own_tokens, 0, 0, 0),
        "work_ahead_ms": work_ahead_ms(work, facts.get("step", StepBegan()), speed, fixed_ms, request["now_s"]),
        "decoding_requests": max(work.decode_requests, load.running),
    }
    return Placement(request=RequestFacts(**request), **(usual | facts))
