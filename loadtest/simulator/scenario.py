"""The fleet to simulate, as values and as a YAML file.

    model: llama-3.1-70b
    pods:
      - {count: 16, hardware: h100x4, kv_tokens: 461376}
    link: {t0_ms: 0.4, gb_per_s: 12.1}

The CLI reads the file and provides the models' coefficients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import PlainValidator as Parsed

from loadtest.simulator.admission_rules import Admission
from loadtest.simulator.router_view import Knowledge
from loadtest.simulator.virtual_pod import VirtualPodConfig
from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.errors import ConfigError
from router.types import AttentionKind, LayerType, Link, Links, Pod, PodSpeed, PrefixTrust, Role

DIALECT = "simulated"


class StrictSpec(BaseModel):
    """Part of a YAML file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StoreSpec(StrictSpec):
    """A store that all pods write to and read from over their links. Without `answers`, only prompts are written."""

    kv_tokens: PositiveInt
    answers: bool = True


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """A pod: `known` is the router's description, whose `speed` may be wrong, and `true` the real one."""

    known: Pod
    true: VirtualPodConfig
    pcie_bytes_per_ms: float = 20e6


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Pods of one model. `link` connects every two of them; the router computes with `believed_links`."""

    pods: tuple[SimulatedPod, ...]
    link: Link | None = None
    believed_links: Links = field(default_factory=Links)
    store: StoreSpec | None = None

    @property
    def splits(self) -> bool:
        return any(pod.known.role is Role.DECODE for pod in self.pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Delays and failures between pods and routers. The defaults are a healthy cluster with KV events.

    `exchange_ms` is the interval at which replicas exchange their work in flight; None for never. `restarts` are
    (replica, at second, seconds until it has read the index again). An engine adds `overhead_ms` to every first token.
    """

    routers: PositiveInt = 1
    route_ms: NonNegativeFloat = 2.0
    overhead_ms: NonNegativeFloat = 0.0
    event_delay_ms: NonNegativeFloat = 50.0
    event_loss: NonNegativeFloat = 0.0
    scrape_ms: PositiveFloat = 1000.0
    exchange_ms: PositiveFloat | None = 40.0
    restarts: tuple[tuple[NonNegativeInt, NonNegativeFloat, NonNegativeFloat], ...] = ()
    regret_every: NonNegativeInt = 0
    """Compute the regret of every Nth decision; 0 for none."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


Prior: TypeAlias = Callable[[str, str], tuple[PodSpeed, int]]
"""(model, hardware) -> coefficients and KV bytes per token. Raises `ConfigError`."""


class PodsSpec(StrictSpec):
    """A group of equal pods."""

    count: PositiveInt
    hardware: str
    kv_tokens: PositiveInt
    cpu_kv_tokens: NonNegativeInt = 0
    role: Role = Role.BOTH
    gpus: PositiveInt = 1
    """GPUs of one pod, for GPU-hours."""
    slowdown: PositiveFloat = 1.0
    """Multiplies the time of every step, of which the router knows: 2 for pods half as fast as their hardware."""


class LinkSpec(StrictSpec):
    """The link between any two pods."""

    t0_ms: NonNegativeFloat
    gb_per_s: PositiveFloat


class BelievedSpec(StrictSpec):
    """The router's errors: factors of the true compute time and bandwidth."""

    compute: PositiveFloat = 1.0
    bandwidth: PositiveFloat = 1.0


def _layers(written: list[str]) -> tuple[LayerType, ...]:
    """The groups of `["6 x window 1024", "full"]`, in order: as an engine numbers and frees them."""
    groups: list[LayerType] = []
    for one in written:
        found = _KV_GROUP.fullmatch(one)
        if found is None:
            raise ValueError(f'{one}: expected "full", "state" or "window TOKENS", with "N x " in front if repeated')
        groups += [LayerType(AttentionKind(found[2] or "window"), 0, int(found[3] or 0))] * int(found[1] or 1)
    if [group.kind for group in groups].count(AttentionKind.FULL) != 1:
        raise ValueError("exactly one group must be `full`")
    return tuple(groups)


_KV_GROUP = re.compile(r"(?:([1-9]\d*) x )?(?:(full|state)|window ([1-9]\d*))")


class FleetSpec(StrictSpec):
    """A fleet file: pods, links and conditions. With `kv_groups`, an engine's blocks are those of the traffic,
    and `kv_tokens` counts the blocks of all groups."""

    about: str = ""
    model: str
    pods: Annotated[tuple[PodsSpec, ...], Field(min_length=1)]
    link: LinkSpec | None = None
    store: StoreSpec | None = None
    pcie_gb_per_s: PositiveFloat = 20.0
    engine_block_tokens: PositiveInt = 16
    kv_groups: Annotated[tuple[LayerType, ...], Parsed(_layers)] = ()
    step_budget_tokens: PositiveInt = 8192
    max_num_seqs: PositiveInt = 256
    conditions: Conditions = Conditions()
    knowledge: Knowledge = Knowledge()
    believed: BelievedSpec = BelievedSpec()
    admission: Admission = Admission()

    @property
    def gpus(self) -> int:
        return sum(group.count * group.gpus for group in self.pods)

    @property
    def pod_count(self) -> int:
        return sum(group.count for group in self.pods)

    def with_pods(self, number: int) -> FleetSpec:
        """A copy with that many pods, its groups in the same proportions. Raises `ConfigError` if one gets no pod."""
        ends = [round(end * number / self.pod_count) for end in accumulate(group.count for group in self.pods)]
        counts = [end - start for start, end in pairwise([0, *ends])]
        if not all(counts):
            raise ConfigError(f"{number} pods are too few for {len(self.pods)} groups in the proportions of the fleet")
        groups = (group.model_copy(update={"count": part}) for group, part in zip(self.pods, counts, strict=True))
        return self.model_copy(update={"pods": tuple(groups)})

    def build(self, prior: Prior) -> SimulatedFleet:
        ids = count(1)
        pods = tuple(self._pod(group, next(ids), prior) for group in self.pods for _ in range(group.count))
        link = believed = None
        if self.link:
            link = Link(self.link.t0_ms, self.link.gb_per_s * BYTES_PER_MS_PER_GB_PER_S)
            believed = replace(link, bytes_per_ms=link.bytes_per_ms * self.believed.bandwidth)
        pcie = Link(0.0, self.pcie_gb_per_s * BYTES_PER_MS_PER_GB_PER_S * self.believed.bandwidth)
        remote = believed if self.store else None
        return SimulatedFleet(pods, link, Links(elsewhere=believed, cpu=pcie, remote=remote), self.store)

    def _pod(self, group: PodsSpec, number: int, prior: Prior) -> SimulatedPod:
        speed, kv_bytes_per_token = prior(self.model, group.hardware)
        speed = speed.scaled(group.slowdown)
        believed_speed = replace(
            speed,
            c1_ms_per_token=speed.c1_ms_per_token * self.believed.compute,
            c2_ms_per_token2=speed.c2_ms_per_token2 * self.believed.compute,
        )
        known = Pod(
            id=f"pod-{number:04}",
            url=f"http://pod-{number:04}",
            engine="vllm",
            speed=believed_speed,
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
            kv_groups=self.kv_groups,
            step_budget_tokens=self.step_budget_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        return SimulatedPod(known, true, self.pcie_gb_per_s * BYTES_PER_MS_PER_GB_PER_S)
