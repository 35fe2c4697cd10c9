"""Plots of simulated runs, for the HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from loadtest.html_page import PlotAxes, Section, Series, bars, cdf, lines
from loadtest.simulator.compare import Result, grouped, in_order_of_mean, mean_of
from loadtest.studies.simulated_stats import OURS
from router.admission.tenant import Slo

MAX_LINES = 8
"""Lines in one plot that a reader can distinguish: the best policies, and ours."""


def plots_of(results: Sequence[Result], pods: int, slo: Slo) -> Section:
    """The plots of the runs with this number of pods; those of the middle load where they are of one load."""
    here = [result for result in results if result.setting.pods == pods]
    loads = sorted({result.setting.load for result in here})
    middle = loads[len(loads) // 2]
    chosen = _chosen([result for result in here if result.setting.load == middle])
    by_policy = {
        policy: runs for policy, runs in grouped(here, lambda setting: setting.policy).items() if policy in chosen
    }
    at_middle = {policy: [run for run in runs if run.setting.load == middle] for policy, runs in by_policy.items()}
    blocks = [_goodput(by_policy, slo)] if len(loads) > 1 else []
    blocks += [_ttft(at_middle, middle, slo), _hits(at_middle), _work(at_middle), _regret(at_middle)]
    return Section(f"{pods} pods", [block for block in blocks if block])


def _chosen(results: Sequence[Result]) -> list[str]:
    best = list(in_order_of_mean(results))
    return best[:MAX_LINES] if OURS not in best[MAX_LINES:] else [*best[: MAX_LINES - 1], OURS]


def _goodput(by_policy: dict[str, list[Result]], slo: Slo) -> str:
    series = []
    for policy, runs in by_policy.items():
        loads = sorted({run.setting.load for run in runs})
        at_load = grouped(runs, lambda setting: setting.load)
        goodput = [mean_of(at_load[load], lambda f: f.goodput_per_s) for load in loads]
        series.append(Series(policy, loads, goodput))
    caption = f"Requests per second within {slo.ttft_ms:g} ms to the first token and {slo.tpot_ms:g} ms per token."
    axes = PlotAxes(
        title="Goodput at the SLO", x="multiple of the traffic's own rate", y="good requests / s", caption=caption
    )
    return lines(axes, series)


def _ttft(by_policy: dict[str, list[Result]], load: float, slo: Slo) -> str:
    upright = {"SLO": slo.ttft_ms} if math.isfinite(slo.ttft_ms) else {}
    axes = PlotAxes(
        title=f"Time to first token at load {load:g}", x="ms", y="share of requests", log_x=True, upright=upright
    )
    return cdf(axes, {policy: [ms for run in runs for ms in run.ttft_ms] for policy, runs in by_policy.items()})


def _hits(by_policy: dict[str, list[Result]]) -> str:
    kinds = sorted({kind for runs in by_policy.values() for run in runs for kind in run.figures.cached_share_by_kind})
    shares = {
        policy: [fmean(run.figures.cached_share_by_kind.get(kind, 0.0) for run in runs) for kind in kinds]
        for policy, runs in by_policy.items()
    }
    return bars(PlotAxes(title="Cached share of the prompt tokens", x="kind of request", y="share"), kinds, shares)


def _work(by_policy: dict[str, list[Result]]) -> str:
    series = [
        Series(policy, list(range(1, len(runs[0].work_tokens) + 1)), [tokens / 1e6 for tokens in runs[0].work_tokens])
        for policy, runs in by_policy.items()
    ]
    axes = PlotAxes(
        title="Computed prompt tokens by pod", x="pod, busiest first", y="million tokens", caption="Seed 0."
    )
    return lines(axes, series)


def _regret(by_policy: dict[str, list[Result]]) -> str:
    samples = {policy: [max(ms, 0.1) for run in runs for ms in run.regret_ms] for policy, runs in by_policy.items()}
    if not any(samples.values()):
        return ""
    caption = "How much earlier the best pod would have sent the first token, by its true cache and queue."
    return cdf(PlotAxes(title="Regret", x="ms", y="share of decisions", log_x=True, caption=caption), samples)
