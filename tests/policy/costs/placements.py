"""One request on one pod, as cost terms see it."""

from __future__ import annotations

from typing import Any

from router.policy.standing import standings
from router.policy.term import Placement, RequestFacts
from router.types import InFlight, Links, PodLoad, PodState, PodStatus, StepBegan
from tests.kit.scenes import SPEED, pod, scene

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
    speed, work, load = facts.pop("speed", SPEED), facts.pop("inflight", InFlight()), facts.pop("load", PodLoad())
    here = facts.pop("pod", None) or pod(
        "a", speed=speed, kv_bytes_per_token=KV_BYTES, capacity_tokens=facts.pop("capacity_tokens", None)
    )
    (standing,) = standings(
        [PodStatus(here, PodState.READY, load)], {here.id: work}, {here.id: facts.pop("step", StepBegan())}
    )
    rest_ms = max(0.0, standing.step_ms - (request["now_s"] - standing.step_began_s) * 1000)
    own_tokens = facts.get("own_tokens", facts.get("cached_tokens", 0))
    usual: dict[str, Any] = {
        "pod": here,
        "standing": standing,
        "work_ahead_ms": rest_ms + standing.behind_ms,
        "compute_ms": speed.compute_ms(facts.get("cached_tokens", 0), request["prompt_tokens"]),
        "own_tokens": own_tokens,
        "held_tokens": (own_tokens, 0, 0, 0),
    }
    return Placement(request=RequestFacts(**request), **(usual | facts))
