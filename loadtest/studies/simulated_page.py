"""The HTML page of simulated runs: verdicts, figures, plots, and in how many settings each policy is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.commands.simulate_report import FIGURE_COLUMNS, FigureColumn, groups_of, slo_note
from loadtest.html_page import Section, definitions, page, paragraph, table
from loadtest.simulator.compare import Result, in_order_of_mean, ttft_mean_ms
from loadtest.studies.simulated_plots import plots_of
from loadtest.studies.simulated_stats import (
    MEASURES,
    REGRET_TITLE,
    best_policies,
    regrets_of,
    seeds_note,
    spread_of,
    verdict_of,
)
from loadtest.tables import GLOSSARY
from router.admission.tenant import Slo

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
