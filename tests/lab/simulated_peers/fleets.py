"""Small fleets to compare formulas on, with work in flight and cached blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.decision import RouteDecision
from router.policy.decide import decide
from router.policy.spec import Policy
from router.policy.term import Picker
from router.types import InFlight, PrefixMatch, Scene
from tests.kit.scenes import BLOCK, POLICIES, pod, prompt, ready, scene

BLOCKS = 100
TOKENS = BLOCKS * BLOCK
IDLE = InFlight()


def fleet(inflight: Mapping[str, InFlight], held: Mapping[str, int] | None = None, **facts: Any) -> Scene:
    """Ready pods of those names, with that work in flight and that number of the prompt's 100 blocks."""
    pods = facts.pop("pods", None) or [pod(name) for name in sorted(inflight)]
    match = PrefixMatch({name: (blocks, 0, 0, 0) for name, blocks in (held or {}).items()})
    usual: dict[str, Any] = {"prompt": prompt(TOKENS), "match": match, "inflight": dict(inflight)}
    return scene(*ready(*pods), **(usual | facts))


def busy(**requests: int) -> dict[str, InFlight]:
    """Pods with that number of requests in flight, all of them decoding."""
    return {name: InFlight(requests=count) for name, count in requests.items()}


def decided(seen: Scene, policy: str, picker: Picker | None = None) -> RouteDecision:
    """The decision of the shipped policy, or of it with another picker."""
    shipped = POLICIES[policy]
    return decide(seen, Policy(policy, shipped.version, shipped.costs, picker or shipped.picker))


def chosen(seen: Scene, policy: str, picker: Picker | None = None) -> str:
    return decided(seen, policy, picker).candidates[0].pod.id
