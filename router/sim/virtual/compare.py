"""Which policy is better, by how much, and is the difference more than chance?

Each setting of a grid is an independent run with its own world, so settings may run in any order and in several
processes. This module also computes the statistics over all runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TypeAlias, TypeVar

import numpy as np

from router.policy.spec import Policy
from router.sim.virtual.admission_rules import Admission
from router.sim.virtual.outcome import Run, RunFigures, figures
from router.sim.virtual.router_view import RouterSettings
from router.sim.virtual.scenario import FleetSpec, Prior
from router.sim.virtual.traffic import Traffic
from router.sim.virtual.world import OnEnded, World, ignore_progress

TrafficAt: TypeAlias = Callable[[float, int], Traffic]
"""(load, seed) -> the traffic, with arrivals `load` times as fast."""

OURS = "cost_aware"
"""The policy that reports compare with the others."""
QUANTILES = 200
TOLERANCE = 0.01
"""A smaller relative difference counts as equal."""
STUDENT_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantile of Student's t distribution, by degrees of freedom from 1."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One run. `load` multiplies the traffic's own rate."""

    policy: str
    load: float
    pods: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    setting: Setting
    figures: RunFigures
    ttft_ms: Sequence[float]
    """Evenly spaced quantiles."""
    work_tokens: Sequence[int]
    """Computed tokens of each pod, in descending order."""
    regret_ms: Sequence[float]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Experiment:
    fleet: FleetSpec
    prior: Prior
    policies: Mapping[str, Policy]
    traffic: TrafficAt

    def run(self, setting: Setting, on_progress: OnEnded = ignore_progress) -> Result:
        spec, traffic = self.fleet.with_pods(setting.pods), self.traffic(setting.load, setting.seed)
        admission = replace(spec.admission, slo=spec.slo)
        world = World(
            spec.build(self.prior),
            self.policies[setting.policy],
            spec.conditions,
            routers=RouterSettings(knowledge=spec.knowledge),
            block_size_tokens=traffic.block_size_tokens,
            seed=setting.seed,
            admission=admission,
        )
        return summarize(setting, world.run(traffic, on_progress), admission)


def summarize(setting: Setting, run: Run, admission: Admission) -> Result:
    ttft_ms = np.array([one.ttft_ms for one in run.outcomes if not one.refused])
    quantiles = np.quantile(ttft_ms, np.linspace(0, 1, QUANTILES + 1)).tolist() if len(ttft_ms) else []
    work = sorted((pod.computed_tokens for pod in run.pods.values()), reverse=True)
    regret_ms = [one.regret_ms for one in run.outcomes if not math.isnan(one.regret_ms)]
    slo_by_kind = {name: admission.tenant_of(name).slo for name in admission.tenants}
    found = figures(run, admission.slo, slo_by_kind)
    return Result(setting, found, quantiles, work, regret_ms, run.duration_ms / 1000)


def grid(policies: Sequence[str], loads: Sequence[float], pods: Sequence[int], seeds: int) -> list[Setting]:
    """All combinations."""
    return [
        Setting(policy, load, number, seed)
        for number in pods
        for load in loads
        for seed in range(seeds)
        for policy in policies
    ]


KeyT = TypeVar("KeyT")


def grouped(results: Iterable[Result], key: Callable[[Setting], KeyT]) -> dict[KeyT, list[Result]]:
    groups: dict[KeyT, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result.setting), []).append(result)
    return groups


Measure: TypeAlias = Callable[[RunFigures], float]
"""A figure by which policies are compared: not negative, lower is better."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds of one setting. `margin` is half of the 95 % confidence interval of the mean; infinite
    for one value."""

    mean: float
    low: float
    high: float
    margin: float = math.inf


def spread_of(results: Iterable[Result], measure: Measure) -> Spread:
    """The spread over the seeds that have the figure; NaN without any."""
    values = [value for result in results if not math.isnan(value := measure(result.figures))]
    if not values:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(fmean(values), min(values), max(values), margin_of(values))


def margin_of(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean of independent values, by Student's t; infinite for one."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.inf
    freedom = len(values) - 1
    # Exact for few values; the expansion of Cornish and Fisher is within 0.1 % beyond.
    quantile = STUDENT_T_975[freedom - 1] if freedom <= len(STUDENT_T_975) else 1.96 + 2.4 / freedom + 3 / freedom**2
    return quantile * stdev(values) / math.sqrt(len(values))


def best_policies(by_policy: Mapping[str, Sequence[Result]], measure: Measure) -> dict[str, Spread]:
    """The policy with the lowest mean, then those that are tied with it, by mean."""
    spreads = {policy: spread_of(runs, measure) for policy, runs in by_policy.items()}
    ordered = sorted(spreads.items(), key=lambda one: (one[1].mean, one[0]))
    best = by_policy[ordered[0][0]]
    return {policy: spread for policy, spread in ordered if is_tied(by_policy[policy], best, measure)}


def is_tied(runs: Sequence[Result], best: Sequence[Result], measure: Measure) -> bool:
    """Whether the data do not show that one policy is behind the best: their means are less than `TOLERANCE` apart, or
    the 95 % confidence interval of the difference reaches 0.

    Seeds have the same arrivals under every policy, so the difference is taken seed by seed: what is chance in both
    runs cancels out."""
    of_best = {run.setting.seed: measure(run.figures) for run in best}
    pairs = [(measure(run.figures), of_best[run.setting.seed]) for run in runs if run.setting.seed in of_best]
    mean, lowest = (fmean(values) for values in zip(*pairs, strict=True)) if pairs else (math.inf, 0.0)
    if mean <= lowest * (1 + TOLERANCE):
        return True
    margin = margin_of([one - other for one, other in pairs])
    return math.isfinite(margin) and mean - lowest <= margin


def ttft_mean_ms(of: RunFigures) -> float:
    """Infinite if no request was served."""
    return math.inf if math.isnan(of.ttft_mean_ms) else of.ttft_mean_ms


def in_order_of_mean(results: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    """The runs of each policy, the lowest mean time to first token first."""
    return sorted(runs_by_policy(results).items(), key=lambda one: spread_of(one[1], ttft_mean_ms).mean)


def runs_by_policy(results: Iterable[Result]) -> dict[str, list[Result]]:
    return grouped(results, lambda setting: setting.policy)
