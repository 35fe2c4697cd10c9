"""Which policy is better, by how much, and is the difference more than chance? Statistics over the seeds of simulated
runs, for the page and for `policy_cases.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from loadtest.commands.simulate_report import groups_of
from loadtest.simulator.compare import Measure, Result, in_order_of_mean, ttft_mean_ms

OURS = "cost_aware"
"""The policy that reports compare with the others."""
TOLERANCE = 0.01
"""A smaller relative difference counts as equal."""
STUDENT_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantile of Student's t distribution, by degrees of freedom from 1."""

MEASURES: dict[str, Measure] = {
    "TTFT mean": ttft_mean_ms,
    "TTFT p99": lambda f: math.inf if math.isnan(f.ttft_p99_ms) else f.ttft_p99_ms,
    "share of SLO misses": lambda f: 1 - f.slo_share,
}
MAX_NAMES = 3
"""Tied policies that a sentence names."""


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


def _behind(by_policy: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """How far the mean TTFT of each policy is above the lowest of the table, in parentheses if that may be chance."""
    best = best_policies(by_policy, ttft_mean_ms)
    lowest = next(iter(best.values())).mean
    shown = {}
    for policy, runs in by_policy.items():
        mean = spread_of(runs, ttft_mean_ms).mean
        by = f"{mean / lowest - 1:+.1%}" if math.isfinite(mean) and lowest else ""
        shown[policy] = f"({by})" if by and policy in best and len(best) > 1 else by
    return shown


REGRET_TITLE = "mean TTFT behind the best"


def regrets_of(results: Sequence[Result]) -> tuple[list[str], list[list[str]]] | None:
    """Columns and rows of the table of all policies over all loads and sizes; None for one load or one policy."""
    groups = groups_of(results)
    if len(groups) < 2 or len({policy for by_policy in groups.values() for policy in by_policy}) < 2:
        return None
    sizes = len({pods for _, pods in groups}) > 1
    behind = [_behind(by_policy) for by_policy in groups.values()]
    rows = [[policy, *(one.get(policy, "") for one in behind)] for policy in in_order_of_mean(results)]
    return ["policy", *(f"{load:g}, {pods} pods" if sizes else f"load {load:g}" for load, pods in groups)], rows


def seeds_note(results: Sequence[Result]) -> str:
    """How far to trust a difference between policies."""
    if len({result.setting.policy for result in results}) < 2:
        return ""
    seeds = len({result.setting.seed for result in results})
    if seeds == 1:
        return "One run each: a small difference may be chance; --seeds 3 shows the spread."
    return (
        f"Means over {seeds} seeds, ± half of the 95 % confidence interval. Policies are tied if the interval of their "
        "difference, seed by seed, reaches 0, or if it is less than 1 %."
    )


def verdict_of(by_policy: Mapping[str, Sequence[Result]], name: str) -> str:
    """Which policies are best by a measure, with its range, and where `OURS` is if it is not among them."""
    best = best_policies(by_policy, MEASURES[name])
    low, high = min(one.low for one in best.values()), max(one.high for one in best.values())
    shown = _shown(name, Spread(low, low, high))
    if len(best) == 1:
        verdict = f"{name}: {next(iter(best))} is best, {shown}"
    else:
        named = sorted(best, key=lambda policy: policy != OURS)[:MAX_NAMES]
        others = f" and {more} more" if (more := len(best) - len(named)) else ""
        verdict = f"{name}: {', '.join(named)}{others} are tied, {shown}"
    if OURS in by_policy and OURS not in best:
        verdict += f"; {OURS} is behind with {_shown(name, spread_of(by_policy[OURS], MEASURES[name]))}"
    return verdict


def _shown(measure: str, spread: Spread) -> str:
    percent = measure == "share of SLO misses"
    low, high = ((f"{value:.1%}" if percent else f"{value:,.0f}") for value in (spread.low, spread.high))
    return (low if low == high else f"{low} to {high}") + ("" if percent else " ms")
