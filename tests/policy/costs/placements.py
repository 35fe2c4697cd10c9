"""One request on one pod, as cost terms see it."""

from __future__ import annotations

from typing import Any

from router.policy.term import Placement
from router.types import InFlight, PodLoad
from tests.policy.scenes import SPEED, pod


def at(**facts: Any) -> Placement:
    usual: dict[str, Any] = {
        "pod": pod("a", speed=facts.pop("speed", SPEED)),
        "load": PodLoad(),
        "inflight": InFlight(),
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "shared_tokens": 0,
        "output_tokens": 100,
    }
    return Placement(**(usual | facts))
