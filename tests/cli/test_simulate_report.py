"""The table, the CSV and the page show the results of runs, including those where our policy is not the best."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from router.cli.simulate_report import summary, verdicts, write_csv, write_report
from router.sim.virtual.compare import Result, Setting, summarize
from router.sim.virtual.outcome import PodUse, RequestOutcome, Run, Slo
from router.sim.virtual.scenario import FleetSpec, PodsSpec

SLO = Slo(ttft_ms=100.0, tpot_ms=50.0)
FLEET = FleetSpec(model="m", pods=(PodsSpec(count=2, hardware="h", kv_tokens=1000),), slo=SLO)
EASY = Setting("", 1.0, 2)


def ran(policy: str, *ttft_ms: float, cached_tokens: int = 50, regret_ms: float = 5.0, at: Setting = EASY) -> Result:
    """A run with these times to first token."""
    outcomes = [
        RequestOutcome("chat", 0.0, 100, 1, cached_tokens=cached_tokens, ttft_ms=ms, e2e_ms=ms, regret_ms=regret_ms)
        for ms in ttft_ms
    ]
    pods = {"a": PodUse(1, 30, 1.0, 0), "b": PodUse(1, 10, 1.0, 0)}
    return summarize(replace(at, policy=policy), Run(outcomes, pods, 1000.0, 100 * len(outcomes)), SLO)


def refused(policy: str) -> Result:
    """A run with one refused request."""
    run = Run([RequestOutcome("chat", 0.0, 100, 1, refused="too long to wait")], {"a": PodUse(0, 0, 0.0, 0)}, 0.0, 0)
    return summarize(replace(EASY, policy=policy), run, SLO)


def shown(results: Sequence[Result]) -> list[list[str]]:
    """Cells of the rows that name a policy."""
    out = io.StringIO()
    Console(file=out, width=200).print(summary(results, SLO))
    return [line.split() for line in out.getvalue().splitlines() if line.split()[:1] and "%" in line]


def page(folder: Path, results: Sequence[Result]) -> str:
    path = folder / "page.html"
    write_report(path, results, FLEET, "some traffic")
    return path.read_text()


def test_the_table_has_a_row_for_each_policy_the_fastest_first() -> None:
    """A constant load and pod count are in the title only."""
    found = shown([ran("slow", 200.0), ran("cost_aware", 20.0)])
    assert [row[0] for row in found] == ["cost_aware", "slow"]
    assert found[0][1:] == ["50.0%", "50%", "20", "ms", "20", "ms", "20", "ms", "100.0%", "1.50", "5", "ms"]


def test_the_table_shows_means_over_seeds_of_each_load() -> None:
    """Groups are ordered by load; runs with wrong coefficients are left out."""
    results = [
        ran("cost_aware", 20.0),
        ran("cost_aware", 40.0, at=replace(EASY, seed=1)),
        ran("cost_aware", 300.0, at=replace(EASY, load=2.0)),
        ran("cost_aware", 9e5, at=replace(EASY, compute=0.7)),
    ]
    found = shown(results)
    assert [(row[1], row[4]) for row in found] == [("1", "30"), ("2", "300")]


def test_long_times_are_shown_in_seconds() -> None:
    """From ten seconds."""
    (row,) = shown([ran("cost_aware", 12_000.0)])
    assert row[3:5] == ["12", "s"]


def test_the_csv_has_a_row_for_each_run_with_setting_and_figures(tmp_path: Path) -> None:
    """Including runs with wrong coefficients; each kind has its own column."""
    path = tmp_path / "runs.csv"
    write_csv(path, [ran("cost_aware", 20.0), ran("slow", 200.0, at=replace(EASY, compute=0.7))])
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["compute"], row["ttft_mean_ms"]) for row in rows] == [
        ("cost_aware", "1.0", "20.0"),
        ("slow", "0.7", "200.0"),
    ]
    assert {row["cached_share"] for row in rows} == {row["cached_share_chat"] for row in rows} == {"0.5"}


def test_verdicts_show_where_our_policy_is_not_the_best() -> None:
    """With the name of the best policy and both figures."""
    sentences = verdicts([ran("cost_aware", 10.0, 110.0), ran("other", 90.0, 90.0)])
    assert sentences[0] == "Load 1, 2 pods: cost_aware has the best TTFT mean, 60 ms."
    assert sentences[1] == "Load 1, 2 pods: other has the best TTFT p99, 90 ms; cost_aware has 110 ms, which is behind."
    assert (
        sentences[2]
        == "Load 1, 2 pods: other has the best share of SLO misses, 0.0%; cost_aware has 50.0%, which is behind."
    )


def test_verdicts_report_ties() -> None:
    """A difference within the tolerance is as good."""
    sentences = verdicts([ran("cost_aware", 51.0), ran("another", 50.5), ran("other", 51.0)])
    assert (
        sentences[0] == "Load 1, 2 pods: another has the best TTFT mean, 50 ms; cost_aware has 51 ms, which is as good."
    )
    assert sentences[2] == "Load 1, 2 pods: another and 2 others have the best share of SLO misses, 0.0%."


def test_verdicts_cover_every_load() -> None:
    """Our policy may be best at one load and not at another."""
    hard = replace(EASY, load=2.0)
    results = [ran("cost_aware", 10.0), ran("other", 20.0)]
    results += [ran("cost_aware", 900.0, at=hard), ran("other", 300.0, at=hard)]
    means = [line for line in verdicts(results) if "best TTFT mean" in line]
    assert len(means) == 2
    assert "cost_aware has the best TTFT mean, 10 ms." in means[0]
    assert "other has the best TTFT mean, 300 ms; cost_aware has 900 ms, which is behind." in means[1]


def test_verdicts_compare_the_highest_hit_rate_with_the_fastest() -> None:
    """No sentence if they are the same policy."""
    greedy, fast = ran("sticky", 100.0, cached_tokens=90), ran("cost_aware", 40.0, cached_tokens=60)
    sentences = "Load 1, 2 pods: sticky has the highest hit rate, 90.0%, at 2.5 times the mean TTFT of cost_aware."
    assert verdicts([greedy, fast])[-1] == sentences
    assert not any("highest hit rate" in line for line in verdicts([fast]))


def test_verdicts_work_without_our_policy() -> None:
    """If it was not run."""
    assert verdicts([ran("one", 10.0), ran("two", 20.0)])[0].endswith("one has the best TTFT mean, 10 ms.")


def test_the_page_names_every_policy_and_repeats_the_verdicts(tmp_path: Path) -> None:
    """All ten policies are listed and eight are drawn, including ours even if it is the slowest."""
    names = [f"policy_{number}" for number in range(9)]
    results = [ran(name, 10.0 + at) for at, name in enumerate(names)] + [ran("cost_aware", 900.0)]
    document = page(tmp_path, results)
    assert "some traffic on m" in document
    assert all(name in document for name in (*names, "cost_aware"))
    assert "cost_aware has 900 ms, which is behind." in document
    figures = document[document.index("<figure") :]
    drawn = figures[: figures.index("</figure>")]
    assert "cost_aware" in drawn and "policy_6" in drawn and "policy_7" not in drawn


def test_the_page_shows_ranks_with_wrong_coefficients(tmp_path: Path) -> None:
    """Here our policy is first with the true ones and second with wrong ones."""
    off = replace(EASY, compute=0.7)
    results = [ran("cost_aware", 10.0), ran("other", 20.0), ran("cost_aware", 30.0, at=off), ran("other", 20.0, at=off)]
    row = "<td>cost_aware</td><td>1.0</td><td>1 to 1</td><td>2 to 2</td>"
    assert row in page(tmp_path, results)


@pytest.mark.parametrize(("loads", "drawn"), [((1.0,), False), ((1.0, 2.0), True)], ids=["one load", "two loads"])
def test_goodput_is_drawn_over_several_loads(tmp_path: Path, loads: Sequence[float], drawn: bool) -> None:
    """The page of a single run has the other plots."""
    document = page(tmp_path, [ran("cost_aware", 10.0, at=replace(EASY, load=load)) for load in loads])
    assert ("Goodput at the SLO" in document) is drawn
    assert "Time to first token at load" in document


def test_regret_is_drawn_only_if_it_was_computed(tmp_path: Path) -> None:
    """Otherwise its cell is empty."""
    without = [ran("cost_aware", 10.0, regret_ms=float("nan"))]
    assert "share of decisions" in page(tmp_path, [ran("cost_aware", 10.0)])
    assert "share of decisions" not in page(tmp_path, without)
    assert shown(without)[0][-1] == "1.50"


def test_runs_that_refused_everything_are_shown_as_such(tmp_path: Path) -> None:
    """Without times; a policy that served requests is better."""
    results = [refused("cost_aware"), ran("other", 10.0)]
    assert [row[0] for row in shown(results)] == ["other", "cost_aware"]
    sentences = verdicts(results)
    assert "other has the best TTFT mean, 10 ms" in sentences[0]
    assert sentences[2].endswith("cost_aware has 100.0%, which is behind.")
    assert "100.0%" in page(tmp_path, results)
    assert "some traffic" in page(tmp_path, [refused("cost_aware")])
