"""How does a YAML file become a fleet to simulate?

    model: llama-3.1-70b
    pods:
      - {count: 16, hardware: h100x4, kv_tokens: 461376}
    link: {t0_ms: 0.4, gb_per_s: 12.1}
    slo: {ttft_ms: 2000, tpot_ms: 100}

This file never reads a file: the CLI brings parsed data and the coefficients of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.sim.virtual.outcome import Slo
from router.sim.virtual.router_view import Knowledge
from router.sim.virtual.simulated_fleet import Conditions, SimulatedFleet, SimulatedPod
from router.sim.virtual.virtual_pod import VirtualPodConfig
from router.types import Link, Links, Pod, PodSpeed, PrefixTrust, Role

Prior: TypeAlias = Callable[[str, str], tuple[PodSpeed, int]]
"""(model, hardware) -> coefficients and KV bytes a token. Raises `ConfigError`."""

DIALECT = "simulated"


class StrictSpec(BaseModel):
    """Part of a YAML file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PodsSpec(StrictSpec):
    """Equal pods."""

    count: PositiveInt
    hardware: str
    kv_tokens: PositiveInt
    cpu_kv_tokens: NonNegativeInt = 0
    role: Role = Role.BOTH
    gpus: PositiveInt = 1
    """Of one pod: what GPU-hours are counted in."""


class LinkSpec(StrictSpec):
    """From any pod to any other."""

    t0_ms: NonNegativeFloat
    gb_per_s: PositiveFloat

    def build(self) -> Link:
        return Link(self.t0_ms, self.gb_per_s * BYTES_PER_MS_PER_GB_PER_S)


class FleetSpec(StrictSpec):
    """A file of a fleet, with what lies between it and its routers, and what is asked of it."""

    about: str = ""
    model: str
    pods: Annotated[tuple[PodsSpec, ...], Field(min_length=1)]
    link: LinkSpec | None = None
    pcie_gb_per_s: PositiveFloat = 20.0
    engine_block_tokens: PositiveInt = 16
    step_budget_tokens: PositiveInt = 8192
    max_num_seqs: PositiveInt = 256
    conditions: Conditions = Conditions()
    knowledge: Knowledge = Knowledge()
    slo: Slo = Slo()

    @property
    def gpus(self) -> int:
        """Of all pods."""
        return sum(group.count * group.gpus for group in self.pods)

    def of_pods(self, number: int) -> FleetSpec:
        """The same with that many pods in its first group."""
        first, *others = self.pods
        return self.model_copy(update={"pods": (first.model_copy(update={"count": number}), *others)})

    def build(self, prior: Prior, *, believed_compute: float = 1.0, believed_bandwidth: float = 1.0) -> SimulatedFleet:
        """The fleet. The factors say how wrong the router's coefficients are."""
        ids = count(1)
        pods = tuple(
            self._pod(group, next(ids), prior, believed_compute) for group in self.pods for _ in range(group.count)
        )
        link = self.link.build() if self.link else None
        believed = replace(link, bytes_per_ms=link.bytes_per_ms * believed_bandwidth) if link else None
        pcie = Link(0.0, self.pcie_gb_per_s * BYTES_PER_MS_PER_GB_PER_S * believed_bandwidth)
        return SimulatedFleet(pods, link, Links(elsewhere=believed, cpu=pcie))

    def _pod(self, group: PodsSpec, number: int, prior: Prior, believed_compute: float) -> SimulatedPod:
        speed, kv_bytes_per_token = prior(self.model, group.hardware)
        known = Pod(
            id=f"pod-{number:04}",
            url=f"http://pod-{number:04}",
            engine="vllm",
            speed=_misjudged(speed, believed_compute),
            role=group.role,
            models=(self.model,),
            block_size_tokens=self.engine_block_tokens,
            kv_bytes_per_token=kv_bytes_per_token,
            handoff=DIALECT,
            pulls=DIALECT,
            trust=PrefixTrust.TRUSTED,
        )
        true = VirtualPodConfig(
            speed=speed,
            kv_tokens=group.kv_tokens,
            cpu_kv_tokens=group.cpu_kv_tokens,
            engine_block_tokens=self.engine_block_tokens,
            step_budget_tokens=self.step_budget_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        return SimulatedPod(known, true, self.pcie_gb_per_s * BYTES_PER_MS_PER_GB_PER_S)


def _misjudged(speed: PodSpeed, factor: float) -> PodSpeed:
    return replace(
        speed,
        c1_ms_per_token=speed.c1_ms_per_token * factor,
        c2_ms_per_token2=speed.c2_ms_per_token2 * factor,
    )
