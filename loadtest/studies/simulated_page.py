"""The HTML page of simulated runs: verdicts, figures, plots, and in how many settings each policy is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from loadtest.commands.simulate_report import FIGURE_COLUMNS, FigureColumn, groups_of, slo_note
from loadtest.html_page import PlotAxes, Section, Series, bars, cdf, definitions, lines, page, paragraph, table
from loadtest.simulator.compare import Result, grouped, in_order_of_mean, mean_of, ttft_mean_ms
from loadtest.studies.simulated_stats import (
    MEASURES,
    OURS,
    REGRET_TITLE,
    best_policies,
    regrets_of,
    seeds_note,
    spread_of,
    verdict_of,
)
from loadtest.tables import GLOSSARY
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


RANGED = ("cached", "mean ms", "p99 ms", "SLO")
"""Columns that show the range over seeds."""


def write_report(path: Path, results: Sequence[Result], model: str, slo: Slo, traffic: str) -> None:
    columns = ["policy", "load", "pods", *(column.title for column in FIGURE_COLUMNS)]
    notes = [paragraph(note) for note in (seeds_note(results), slo_note(slo)) if note]
    sections = [
        Section("Summary", [paragraph(line) for line in verdicts(results)] + notes),
        Section("Figures", [definitions(columns), table(columns, _rows(results))]),
        *_regret_section(results),
        *(plots_of(results, pods, slo) for pods in sorted({result.setting.pods for result in results})),
        *_robustness(results),
    ]
    path.write_text(page(f"{traffic} on {model}", sections), encoding="utf-8")


def verdicts(results: Sequence[Result]) -> list[str]:
    """The best policies by each measure, and the comparison with ours."""
    lines = []
    for (load, pods), by_policy in groups_of(results).items():
        where = f"Load {load:g}, {pods} pods"
        lines += [f"{where}: {verdict_of(by_policy, name)}." for name in MEASURES]
        lines += [f"{where}: {note}" for note in _cached_share_note(by_policy)]
    return lines


def _cached_share_note(by_policy: Mapping[str, Sequence[Result]]) -> list[str]:
    """A sentence if the policy with the highest cached share is not among the fastest."""
    highest, computed = next(iter(best_policies(by_policy, lambda f: 1 - f.cached_share).items()))
    fastest = best_policies(by_policy, ttft_mean_ms)
    if highest in fastest:
        return []
    first, fast = next(iter(fastest.items()))
    times = spread_of(by_policy[highest], ttft_mean_ms).mean / fast.mean
    return [
        f"{highest} has the highest cached share, {1 - computed.mean:.1%}, at {times:.1f} times the mean TTFT of "
        f"{first}."
    ]


def _rows(results: Sequence[Result]) -> list[list[str]]:
    return [
        [policy, f"{load:g}", str(pods), *(_cell(column, runs) for column in FIGURE_COLUMNS)]
        for (load, pods), by_policy in groups_of(results).items()
        for policy, runs in by_policy.items()
    ]


def _cell(column: FigureColumn, runs: Sequence[Result]) -> str:
    """The mean over seeds, of several with the range."""
    spread = spread_of(runs, column.value)
    if math.isnan(spread.mean) or len(runs) < 2 or column.title not in RANGED:
        return column.cell(runs)
    low, high = column.shown(spread.low), column.shown(spread.high)
    shown = low if low == high else f"{low}\u2013{high}"
    return f"{column.cell(runs)} ({shown})"


def _regret_section(results: Sequence[Result]) -> list[Section]:
    regrets = regrets_of(results)
    note = paragraph(
        f"{REGRET_TITLE} policy of each load and size: {GLOSSARY['behind']}, in parentheses if that may be chance."
    )
    return [Section("Regret", [note, table(*regrets)])] if regrets else []


def _robustness(results: Sequence[Result]) -> list[Section]:
    """In how many settings each policy is best or tied. Needs several settings."""
    groups = groups_of(results)
    if len(groups) < 2:
        return []
    best = {
        name: [best_policies(by_policy, measure) for by_policy in groups.values()] for name, measure in MEASURES.items()
    }
    rows = []
    for policy in in_order_of_mean(results):
        counts = (sum(policy in one for one in found) for found in best.values())
        rows.append([policy, *(f"{count} of {len(groups)}" for count in counts)])
    note = paragraph(
        "In how many combinations of load and pods a policy is best or tied with the best, by each measure."
    )
    return [Section("Robustness", [note, table(["policy", *(f"best {name}" for name in MEASURES)], rows)])]
