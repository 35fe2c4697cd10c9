"""How many pods does this traffic need, and what would save some of them?

For each way to build the fleet, the fewest pods that meet the SLO for enough of the requests. This file never reads a
file and never draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from router.sim.virtual.compare import Experiment, Setting
from router.sim.virtual.outcome import RunFigures
from router.sim.virtual.scenario import FleetSpec, PodsSpec
from router.types import BlockHash, Role

POLICY_APART = "cost_aware_pd"
"""Which decides where prefill and decode are apart: the others may not price a handoff."""
PREFILL_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build the fleet: a policy, a DRAM tier or none, prefill apart or not."""

    name: str
    policy: str
    cpu_kv_tokens: int | None = None
    """None for what the fleet's file says."""
    disaggregated: bool = False


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The fewest pods, and what they then do. `layout` says how they are divided, if they are."""

    variant: Variant
    pods: int
    gpus: int
    figures: RunFigures
    duration_s: float
    layout: str = ""

    @property
    def gpu_hours(self) -> float:
        """For the whole of the traffic."""
        return self.gpus * self.duration_s / 3600

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not cached."""
        return self.figures.prompt_tokens - self.figures.cached_tokens


def variants(policy: str, against: Sequence[str], cpu_kv_tokens: int, link: bool) -> list[Variant]:
    """The policies as the fleet is, then with a tier, then with prefill apart where there is a link for its KV."""
    found = [Variant(name, name) for name in (*against, policy)]
    if cpu_kv_tokens:
        found.append(Variant(f"{policy}, {cpu_kv_tokens / 1e6:g}M tokens of DRAM", policy, cpu_kv_tokens=cpu_kv_tokens))
    if link:
        found.append(Variant(f"{POLICY_APART}, prefill apart", POLICY_APART, disaggregated=True))
    return found


def plan_variant(setup: Experiment, variant: Variant, target: float, most: int) -> PlanResult | None:
    """The fewest pods, up to `most`, with which `target` of the requests meet the SLO; None if even those do not."""
    smallest = 2 if variant.disaggregated else 1
    if most < smallest:
        return None
    tried: dict[int, PlanResult] = {}
    setup = replace(setup, fleet=_without_regret(setup.fleet))

    def enough(pods: int) -> bool:
        tried[pods] = _best_layout(setup, variant, pods)
        return tried[pods].figures.slo_share >= target

    fewest = smallest_that(enough, min(max(fewest_by_compute(setup), smallest), most), most)
    return None if fewest is None else tried[fewest]


def fewest_by_compute(setup: Experiment) -> int:
    """Pods that have the time to compute every prompt once, on one cache that never evicts: nothing needs fewer. Saves
    the simulation of fleets that drown."""
    traffic = setup.traffic(1.0, 0)
    speed, _ = setup.prior(setup.fleet.model, setup.fleet.pods[0].hardware)
    known: set[BlockHash] = set()
    work_ms = last_s = 0.0
    for session in traffic.sessions:
        last_s = session.start_s
        for ask in session.requests:
            blocks = ask.blocks
            found = next((at for at in range(ask.prompt_blocks) if blocks[at] not in known), ask.prompt_blocks)
            known.update(blocks)
            work_ms += speed.compute_ms(min(found * traffic.block_size_tokens, ask.prompt_tokens), ask.prompt_tokens)
            last_s += ask.think_s
    return max(int(work_ms / max(last_s * 1000, 1.0)), 1)


def _without_regret(fleet: FleetSpec) -> FleetSpec:
    return fleet.model_copy(update={"conditions": replace(fleet.conditions, regret_every=0)})


def smallest_that(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """By doubling and then by halves: more is taken to be never worse. None where not even `most` are. O(log) calls."""
    if least > most:
        return None
    low, high = least - 1, least
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _best_layout(setup: Experiment, variant: Variant, pods: int) -> PlanResult:
    results = [_answer(setup, variant, spec, layout) for spec, layout in _layouts(setup.fleet, variant, pods)]
    return max(results, key=lambda one: one.figures.slo_share)


def _answer(setup: Experiment, variant: Variant, spec: FleetSpec, layout: str) -> PlanResult:
    pods = sum(group.count for group in spec.pods)
    result = replace(setup, fleet=spec).run(Setting(variant.policy, 1.0, spec.pods[0].count))
    return PlanResult(variant, pods, spec.gpus, result.figures, result.duration_s, layout)


def _layouts(fleet: FleetSpec, variant: Variant, pods: int) -> Iterator[tuple[FleetSpec, str]]:
    group = fleet.pods[0]
    if variant.cpu_kv_tokens is not None:
        group = group.model_copy(update={"cpu_kv_tokens": variant.cpu_kv_tokens})
    if not variant.disaggregated:
        yield _fleet_of(fleet, group.model_copy(update={"count": pods, "role": Role.BOTH})), ""
        return
    for prefill in sorted({min(max(round(pods * share), 1), pods - 1) for share in PREFILL_SHARES}):
        first = group.model_copy(update={"count": prefill, "role": Role.PREFILL})
        second = group.model_copy(update={"count": pods - prefill, "role": Role.DECODE})
        yield _fleet_of(fleet, first, second), f"{prefill} prefill, {pods - prefill} decode"


def _fleet_of(fleet: FleetSpec, *groups: PodsSpec) -> FleetSpec:
    return fleet.model_copy(update={"pods": groups})
