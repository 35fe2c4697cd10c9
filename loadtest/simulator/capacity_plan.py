"""How many pods does this traffic need, and what would reduce that number?

For each variant of the fleet, the smallest number of pods with which enough requests meet the SLO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from loadtest.simulator.compare import Experiment, Setting
from loadtest.simulator.outcome import RunFigures
from loadtest.simulator.scenario import FleetSpec, PodsSpec
from loadtest.simulator.traffic import IdealCache
from router.types import Role

SPLIT_POLICY = "cost_aware_pd"
"""Decides where prefill and decode run on different pods: other policies may not price a handoff."""
PREFILL_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    policy: str
    cpu_kv_tokens: int | None = None
    """KV tokens of a DRAM tier; None for the value in the fleet file."""
    disaggregated: bool = False
    """Prefill and decode run on different pods."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The smallest fleet of a variant, and its figures. `layout` is the split into prefill and decode pods."""

    variant: Variant
    pods: int
    gpus: int
    figures: RunFigures
    duration_s: float
    layout: str = ""

    @property
    def computed_tokens(self) -> int:
        return self.figures.prompt_tokens - self.figures.cached_tokens


def variants(policy: str, against: Sequence[str], cpu_kv_tokens: int, has_link: bool) -> list[Variant]:
    """The policies on the fleet as it is, then `policy` with a DRAM tier, then disaggregated if pods have a link."""
    found = [Variant(name, name) for name in (*against, policy)]
    if cpu_kv_tokens:
        found.append(Variant(f"{policy}, {cpu_kv_tokens / 1e6:g}M tokens of DRAM", policy, cpu_kv_tokens=cpu_kv_tokens))
    if has_link:
        found.append(Variant(f"{SPLIT_POLICY}, prefill apart", SPLIT_POLICY, disaggregated=True))
    return found


def plan(setup: Experiment, target: float, max_pods: int, variant: Variant) -> PlanResult | None:
    """The smallest fleet of a variant with which a share of `target` requests meets the SLO; None if `max_pods` are too
    few. The search begins with the fewest pods that can compute the traffic."""
    conditions = replace(setup.fleet.conditions, regret_every=0)
    setup = replace(setup, fleet=setup.fleet.model_copy(update={"conditions": conditions}))
    min_pods = max(min(min_pods_to_compute(setup), max_pods), 2 if variant.disaggregated else 1)
    tried: dict[int, PlanResult] = {}

    def is_enough(pods: int) -> bool:
        tried[pods] = _best_layout(setup, variant, pods)
        return tried[pods].figures.slo_share >= target

    smallest = smallest_that(is_enough, min_pods, max_pods)
    return None if smallest is None else tried[smallest]


def min_pods_to_compute(setup: Experiment) -> int:
    """A lower bound: pods that have the time to compute every prompt once, with one cache that never evicts.

    Smaller fleets are overloaded and need no simulation."""
    traffic = setup.traffic(1.0, 0)
    speed, _ = setup.prior(setup.fleet.model, setup.fleet.pods[0].hardware)
    cache = IdealCache(traffic.block_size_tokens)
    work_ms = last_s = 0.0
    for session in traffic.sessions:
        last_s = session.start_s
        for request in session.requests:
            work_ms += speed.compute_ms(cache.serve(request), request.prompt_tokens)
            last_s += request.think_s
    return max(int(work_ms / max(last_s * 1000, 1.0)), 1)


def smallest_that(is_enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number from `low` to `high` that is enough, or None.

    Doubles, then bisects, so it assumes that a larger number is never worse. O(log) calls."""
    if low > high:
        return None
    too_few, number = low - 1, low
    while not is_enough(number):
        if number >= high:
            return None
        too_few, number = number, min(number * 2, high)
    while number - too_few > 1:
        middle = (too_few + number) // 2
        too_few, number = (too_few, middle) if is_enough(middle) else (middle, number)
    return number


def _best_layout(setup: Experiment, variant: Variant, pods: int) -> PlanResult:
    results = []
    for groups, layout in _layouts(setup.fleet, variant, pods):
        fleet = setup.fleet.model_copy(update={"pods": groups})
        run = replace(setup, fleet=fleet).run(Setting(variant.policy, 1.0, fleet.pod_count))
        results.append(PlanResult(variant, pods, fleet.gpus, run.figures, run.duration_s, layout))
    return max(results, key=lambda one: one.figures.slo_share)


def _layouts(fleet: FleetSpec, variant: Variant, pods: int) -> Iterator[tuple[tuple[PodsSpec, ...], str]]:
    group = fleet.pods[0]
    if variant.cpu_kv_tokens is not None:
        group = group.model_copy(update={"cpu_kv_tokens": variant.cpu_kv_tokens})
    if not variant.disaggregated:
        yield (group.model_copy(update={"count": pods, "role": Role.BOTH}),), ""
        return
    for prefill in sorted({min(max(round(pods * share), 1), pods - 1) for share in PREFILL_SHARES}):
        first = group.model_copy(update={"count": prefill, "role": Role.PREFILL})
        second = group.model_copy(update={"count": pods - prefill, "role": Role.DECODE})
        yield (first, second), f"{prefill} prefill, {pods - prefill} decode"
