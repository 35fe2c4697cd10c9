"""Which policy is better?

Each setting of a grid is an independent run with its own world, so settings may run in any order and in several
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias, TypeVar

import numpy as np

from loadtest.simulator.outcome import Run, RunFigures, figures
from loadtest.simulator.router_view import RouterSettings
from loadtest.simulator.scenario import FleetSpec, Prior
from loadtest.simulator.traffic import Traffic
from loadtest.simulator.world import OnEnded, World, ignore_progress
from router.admission.tenant import Slo, Tenant
from router.policy.spec import Policy

TrafficAt: TypeAlias = Callable[[float, int], Traffic]
"""(load, seed) -> the traffic, with arrivals `load` times as fast."""

QUANTILES = 200
DEFAULT_SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0)


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
    slo: Slo = DEFAULT_SLO

    def run(self, setting: Setting, on_progress: OnEnded = ignore_progress) -> Result:
        spec, traffic = self.fleet.with_pods(setting.pods), self.traffic(setting.load, setting.seed)
        world = World(
            spec.build(self.prior),
            self.policies[setting.policy],
            spec.conditions,
            routers=RouterSettings(knowledge=spec.knowledge, slo=self.slo),
            block_size_tokens=traffic.block_size_tokens,
            seed=setting.seed,
            admission=spec.admission,
        )
        return summarize(setting, world.run(traffic, on_progress), self.slo, spec.admission.tenants)


def summarize(setting: Setting, run: Run, slo: Slo, tenants: Mapping[str, Tenant]) -> Result:
    ttft_ms = np.array([one.ttft_ms for one in run.outcomes if not one.refused])
    quantiles = np.quantile(ttft_ms, np.linspace(0, 1, QUANTILES + 1)).tolist() if len(ttft_ms) else []
    work = sorted((pod.computed_tokens for pod in run.pods.values()), reverse=True)
    regret_ms = [one.regret_ms for one in run.outcomes if not math.isnan(one.regret_ms)]
    found = figures(run, slo, {name: tenant.slo for name, tenant in tenants.items() if tenant.slo})
    return Result(setting, found, quantiles, work, regret_ms, run.duration_ms / 1000)


def grid(policies: Sequence[str], loads: Sequence[float], pods: Sequence[int], seeds: int) -> list[Setting]:
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


def ttft_mean_ms(of: RunFigures) -> float:
    """Infinite if no request was served."""
    return math.inf if math.isnan(of.ttft_mean_ms) else of.ttft_mean_ms


def mean_of(results: Iterable[Result], measure: Measure) -> float:
    """The mean over the seeds that have the figure; NaN without any."""
    values = [value for result in results if not math.isnan(value := measure(result.figures))]
    return fmean(values) if values else math.nan


def in_order_of_mean(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The runs of each policy, the lowest mean time to first token first."""
    by_policy = grouped(results, lambda setting: setting.policy)
    return dict(sorted(by_policy.items(), key=lambda one: mean_of(one[1], ttft_mean_ms)))
