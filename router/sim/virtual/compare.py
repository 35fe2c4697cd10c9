"""Which policy is better, by how much, and is that more than chance?

A grid of settings, each a run of its own world with nothing shared, so that they may run in any order and in several
processes; and what follows from all of them together. This file never reads a file and never draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

import numpy as np

from router.policy.spec import Policy
from router.sim.virtual.outcome import Run, RunFigures, Slo, figures
from router.sim.virtual.scenario import FleetSpec, Prior
from router.sim.virtual.traffic import Traffic
from router.sim.virtual.world import Progressed, World

TrafficAt: TypeAlias = Callable[[float, int], Traffic]
"""(load, seed) -> the traffic, with arrivals so many times faster."""

QUANTILES = 200


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One run. `load` multiplies the traffic's own rate; `compute` and `bandwidth` say by which factor the router
    misjudges the pods' coefficients and the link."""

    policy: str
    load: float
    pods: int
    seed: int = 0
    compute: float = 1.0
    bandwidth: float = 1.0

    @property
    def misjudged(self) -> bool:
        return self.compute != 1.0 or self.bandwidth != 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a run is remembered by: figures, the distribution of times to first token, work by pod, regret."""

    setting: Setting
    figures: RunFigures
    ttft_ms: Sequence[float]
    """Evenly spaced quantiles."""
    work_tokens: Sequence[int]
    regret_ms: Sequence[float]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """All that the settings have in common."""

    fleet: FleetSpec
    prior: Prior
    policies: Mapping[str, Policy]
    traffic: TrafficAt

    def run(self, setting: Setting, progressed: Progressed = lambda _: None) -> Result:
        """One run from begin to end."""
        spec, traffic = self.fleet.of_pods(setting.pods), self.traffic(setting.load, setting.seed)
        world = World(
            spec.build(self.prior, believed_compute=setting.compute, believed_bandwidth=setting.bandwidth),
            self.policies[setting.policy],
            spec.conditions,
            knowledge=spec.knowledge,
            block_size_tokens=traffic.block_size_tokens,
            seed=setting.seed,
        )
        return summarize(setting, world.run(traffic, progressed), spec.slo)


def summarize(setting: Setting, run: Run, slo: Slo) -> Result:
    """A run without its requests."""
    ttft_ms = np.array([one.ttft_ms for one in run.outcomes if not one.refused])
    quantiles = np.quantile(ttft_ms, np.linspace(0, 1, QUANTILES + 1)).tolist() if len(ttft_ms) else []
    work = sorted((pod.computed_tokens for pod in run.pods.values()), reverse=True)
    regret_ms = [one.regret_ms for one in run.outcomes if not math.isnan(one.regret_ms)]
    return Result(setting, figures(run, slo), quantiles, work, regret_ms, run.duration_ms / 1000)


def grid(
    policies: Sequence[str], loads: Sequence[float], pods: Sequence[int], seeds: int, wrong: bool
) -> list[Setting]:
    """Every combination; and with `wrong`, at the middle load, coefficients 30 % off and a bandwidth 2x off."""
    plain = [
        Setting(policy, load, number, seed)
        for number in pods
        for load in loads
        for seed in range(seeds)
        for policy in policies
    ]
    if not wrong:
        return plain
    middle = sorted(loads)[len(loads) // 2]
    off = [(0.7, 1.0), (1.3, 1.0), (1.0, 0.5), (1.0, 2.0)]
    return plain + [
        Setting(policy, middle, pods[0], 0, compute, bandwidth) for compute, bandwidth in off for policy in policies
    ]


Measure: TypeAlias = Callable[[RunFigures], float]
"""What policies are ranked by: the lower, the better."""


def mean_of(results: Iterable[Result], measure: Measure) -> float:
    """Over seeds; NaN of none."""
    values = [measure(result.figures) for result in results]
    return fmean(values) if values else math.nan


def ranks(results: Sequence[Result], measure: Measure) -> dict[str, list[int]]:
    """By policy its places, the best 1, in every group of runs that differ in the policy alone."""
    groups: dict[Setting, list[Result]] = {}
    for result in results:
        groups.setdefault(replace(result.setting, policy=""), []).append(result)
    places: dict[str, list[int]] = {}
    for group in groups.values():
        for place, result in enumerate(sorted(group, key=lambda one: measure(one.figures)), start=1):
            places.setdefault(result.setting.policy, []).append(place)
    return places
