"""The table and the CSV show the results of runs, including those where our policy is not the best."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadtest.commands.simulate_report import summary, write_csv
from loadtest.simulator.compare import Result
from tests.lab.simulated_runs import EASY, SLO, over_seeds, ran, refused


def printed(results: Sequence[Result], width: int) -> str:
    """The summary on a terminal."""
    out = io.StringIO()
    Console(file=out, width=width).print(summary(results, SLO))
    return out.getvalue()


def shown(results: Sequence[Result]) -> list[list[str]]:
    """Cells of the rows that name a policy."""
    return [line.split() for line in printed(results, 200).splitlines() if re.search(r"\d%", line)]


def test_the_table_has_a_row_for_each_policy_the_fastest_first() -> None:
    """Load and pod count are in the title."""
    found = shown([ran("slow", 200.0), ran("cost_aware", 20.0)])
    assert [row[0] for row in found] == ["cost_aware", "slow"]
    assert found[0][1:] == ["50.0%", "50%", "20", "+0.0%", "20", "20", "100.0%", "5"]
    assert found[1][3:5] == ["200", "+900.0%"]


def test_each_load_has_a_table_of_means_over_seeds() -> None:
    """Ordered by load."""
    results = [
        ran("cost_aware", 20.0),
        ran("cost_aware", 40.0, at=replace(EASY, seed=1)),
        ran("cost_aware", 300.0, at=replace(EASY, load=2.0)),
    ]
    assert [row[3:5] for row in shown(results)] == [["30", "+0.0%"], ["300", "+0.0%"]]


def test_single_runs_are_said_to_be_such() -> None:
    """If there is something to compare."""
    text = " ".join(printed([ran("cost_aware", 20.0), ran("slow", 200.0)], 80).split())
    assert "One run each: a small difference may be chance" in text
    assert "One run each" not in printed([ran("cost_aware", 20.0)], 80)


def test_names_and_figures_fit_into_80_columns() -> None:
    """The longest name of a policy, and times of an overloaded fleet."""
    slow = over_seeds("aibrix_prefix_cache", 1_234_567.0, 2_345_678.0)
    text = printed([*slow, *over_seeds("cost_aware", 20.0, 30.0)], 80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "1,790,122" in text
    assert "aibrix_prefix_cache" in printed([ran("aibrix_prefix_cache", 20.0)], 80)


def test_every_column_is_explained() -> None:
    """Below the tables."""
    results = [*over_seeds("cost_aware", 20.0, 30.0), *over_seeds("other", 20.0, 30.0)]
    text = " ".join(printed(results, 80).split())
    titles = ("cached", "of ideal", "mean ms", "behind", "p50 ms", "p99 ms", "SLO", "regret")
    assert all(f"{title}: " in text for title in titles)


def test_the_csv_has_a_row_for_each_run_with_setting_and_figures(tmp_path: Path) -> None:
    """Each kind of request has its own column."""
    path = tmp_path / "runs.csv"
    write_csv(path, [ran("cost_aware", 20.0), ran("slow", 200.0, at=replace(EASY, load=2.0))])
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["load"], row["ttft_mean_ms"]) for row in rows] == [
        ("cost_aware", "1.0", "20.0"),
        ("slow", "2.0", "200.0"),
    ]
    assert {row["cached_share"] for row in rows} == {row["cached_share_chat"] for row in rows} == {"0.5"}


def test_a_figure_that_no_run_has_is_no_column() -> None:
    """The regret is computed on request only."""
    assert shown([ran("cost_aware", 10.0, regret_ms=float("nan"))])[0][-1] == "100.0%"


def test_a_policy_that_refused_everything_comes_last() -> None:
    """Without times."""
    assert [row[0] for row in shown([refused("cost_aware"), ran("other", 10.0)])] == ["other", "cost_aware"]
