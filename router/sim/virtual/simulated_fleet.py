"""Which pods are there, what lies between them, and how well do routers hear of it?

Values that a world is made from. This file never simulates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from router.sim.virtual.virtual_pod import VirtualPodConfig
from router.types import Link, Links, Pod, Role


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """A pod as the router knows it (its `speed` may be wrong there) and as it is."""

    known: Pod
    true: VirtualPodConfig
    pcie_bytes_per_ms: float = 20e6


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Pods of one model. `link` leads from any to any of them, and `believed_links` are what the router takes that and
    the pods' tiers for."""

    pods: tuple[SimulatedPod, ...]
    link: Link | None = None
    believed_links: Links = field(default_factory=Links)

    @property
    def splits(self) -> bool:
        """Whether prefill and decode are apart."""
        return any(pod.known.role is Role.DECODE for pod in self.pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Between pods and routers. Defaults are a healthy cluster with KV events.

    `exchange_ms`: how often replicas tell one another what they have in flight; None for never. `restarts`: (replica,
    at second, seconds until it has read the index again). `refuse_above_ms`: a request whose cheapest price is above is
    refused. `overhead_ms`: what an engine adds to every first token beside compute.
    """

    routers: PositiveInt = 1
    route_ms: NonNegativeFloat = 2.0
    overhead_ms: NonNegativeFloat = 0.0
    event_delay_ms: NonNegativeFloat = 50.0
    event_loss: NonNegativeFloat = 0.0
    scrape_ms: PositiveFloat = 1000.0
    exchange_ms: PositiveFloat | None = 40.0
    restarts: tuple[tuple[NonNegativeInt, NonNegativeFloat, NonNegativeFloat], ...] = ()
    refuse_above_ms: float = math.inf
    handoff_layers: PositiveInt = 1
    """KV of a handoff from prefill to decode moves layer by layer beside the compute: 1 for not at all."""
    regret_every: NonNegativeInt = 0
    """Look back at every so many decisions; 0 for none."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
