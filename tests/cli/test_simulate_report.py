"""The table, the CSV and the page show the results of runs, including those where our policy is not the best."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from router.admission.tenant import Slo
from router.cli.simulate_report import summary, verdicts, write_csv, write_report
from router.sim.virtual.admission_rules import Admission
from router.sim.virtual.compare import Result, Setting, summarize
from router.sim.virtual.outcome import PodUse, RequestOutcome, Run
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
    return summarize(replace(at, policy=policy), Run(outcomes, pods, 1000.0, 100 * len(outcomes)), Admission(slo=SLO))


def refused(policy: str) -> Result:
    """A run with one refused request."""
    run = Run([RequestOutcome("chat", 0.0, 100, 1, refused="too long to wait")], {"a": PodUse(0, 0, 0.0, 0)}, 0.0, 0)
    return summarize(replace(EASY, policy=policy), run, Admission(slo=SLO))


def over_seeds(policy: str, *ttft_ms: float) -> list[Result]:
    """A run of each time, with a seed of its own."""
    return [ran(policy, ms, at=replace(EASY, seed=seed)) for seed, ms in enumerate(ttft_ms)]


def printed(results: Sequence[Result], width: int) -> str:
    """The summary on a terminal."""
    out = io.StringIO()
    Console(file=out, width=width).print(summary(results, SLO))
    return out.getvalue()


def shown(results: Sequence[Result]) -> list[list[str]]:
    """Cells of the rows that name a policy."""
    return [line.split() for line in printed(results, 200).splitlines() if re.search(r"\d%", line)]


def page(folder: Path, results: Sequence[Result]) -> str:
    path = folder / "page.html"
    write_report(path, results, FLEET, "some traffic")
    return path.read_text()


def test_the_table_has_a_row_for_each_policy_the_fastest_first() -> None:
    """Load and pod count are in the title."""
    found = shown([ran("slow", 200.0), ran("cost_aware", 20.0)])
    assert [row[0] for row in found] == ["cost_aware", "slow"]
    assert found[0][1:] == ["50.0%", "50%", "20", "+0.0%", "20", "20", "100.0%", "5"]
    assert found[1][3:5] == ["200", "+900.0%"]


def test_each_load_has_a_table_of_means_and_intervals_over_seeds() -> None:
    """Ordered by load; runs with wrong coefficients are left out."""
    results = [
        ran("cost_aware", 20.0),
        ran("cost_aware", 40.0, at=replace(EASY, seed=1)),
        ran("cost_aware", 300.0, at=replace(EASY, load=2.0)),
        ran("cost_aware", 9e5, at=replace(EASY, compute=0.7)),
    ]
    assert [row[3:5] for row in shown(results)] == [["30", "127"], ["300", "+0.0%"]]


def test_tied_policies_have_no_place() -> None:
    """The seeds do not show which of the two is better, so both are tied; a third one is behind."""
    tied = [*over_seeds("agents", 20.0, 30.0, 28.0), *over_seeds("cost_aware", 25.0, 24.0, 30.0)]
    text = printed([*tied, *over_seeds("slow", 50.0, 51.0, 52.0)], 80)
    assert "TTFT mean: cost_aware, agents are tied, 20 to 30 ms." in text
    assert "reaches 0" in text
    by_name = {line.split()[0]: line.split() for line in text.splitlines() if "%" in line and line.split()[:1]}
    assert (by_name["agents"][5], by_name["cost_aware"][5]) == ("(+0.0%)", "(+1.3%)")
    assert by_name["slow"][5] == "+96.2%"


def test_the_regret_of_each_load_is_a_table() -> None:
    """Relative to the best policy in hindsight, whichever that is. None for a single load."""
    hard = replace(EASY, load=2.0)
    easy = [ran("cost_aware", 10.0), ran("other", 20.0)]
    text = printed([*easy, ran("cost_aware", 900.0, at=hard), ran("other", 300.0, at=hard)], 80)
    at = text.index("mean TTFT behind the best")
    rows = {line.split()[0]: line.split()[1:] for line in text[at:].splitlines() if "%" in line}
    assert rows == {"other": ["+100.0%", "+0.0%"], "cost_aware": ["+0.0%", "+200.0%"]}
    assert "behind the best" not in printed(easy, 80)


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
    assert "1,790,122" in text and "7,058,888" in text
    assert "aibrix_prefix_cache" in printed([ran("aibrix_prefix_cache", 20.0)], 80)


def test_every_column_is_explained(tmp_path: Path) -> None:
    """On the terminal and on the page."""
    results = [*over_seeds("cost_aware", 20.0, 30.0), *over_seeds("other", 20.0, 30.0)]
    text = " ".join(printed(results, 80).split())
    titles = ("cached", "of ideal", "mean ms", "± ms", "behind", "p99 ms", "SLO", "regret")
    assert all(f"{title}: " in text for title in titles)
    document = page(tmp_path, results)
    header = re.findall("<th>(.*?)</th>", document[: document.index("</tr>")])
    assert header[1:] == re.findall("<dt>(.*?)</dt>", document) and len(header) == 11


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
    assert verdicts([ran("cost_aware", 10.0, 110.0), ran("other", 90.0, 90.0)])[:3] == [
        "Load 1, 2 pods: TTFT mean: cost_aware is best, 60 ms.",
        "Load 1, 2 pods: TTFT p99: other is best, 90 ms; cost_aware is behind with 110 ms.",
        "Load 1, 2 pods: share of SLO misses: other is best, 0.0%; cost_aware is behind with 50.0%.",
    ]


def test_verdicts_report_ties() -> None:
    """Ours first, then the others by mean; a difference within the tolerance is a tie."""
    sentences = verdicts([ran("cost_aware", 51.0), ran("another", 50.5), ran("other", 51.0), ran("more", 51.0)])
    assert sentences[0] == "Load 1, 2 pods: TTFT mean: cost_aware, another, more and 1 more are tied, 50 to 51 ms."


def test_verdicts_cover_every_load() -> None:
    """Our policy may be best at one load and not at another."""
    hard = replace(EASY, load=2.0)
    results = [ran("cost_aware", 10.0), ran("other", 20.0)]
    results += [ran("cost_aware", 900.0, at=hard), ran("other", 300.0, at=hard)]
    means = [line for line in verdicts(results) if "TTFT mean: " in line]
    assert len(means) == 2
    assert "cost_aware is best, 10 ms." in means[0]
    assert "other is best, 300 ms; cost_aware is behind with 900 ms." in means[1]


def test_verdicts_compare_the_highest_cached_share_with_the_fastest() -> None:
    """No sentence if they are the same policy."""
    greedy, fast = ran("sticky", 100.0, cached_tokens=90), ran("cost_aware", 40.0, cached_tokens=60)
    sentences = "Load 1, 2 pods: sticky has the highest cached share, 90.0%, at 2.5 times the mean TTFT of cost_aware."
    assert verdicts([greedy, fast])[-1] == sentences
    assert not any("highest cached share" in line for line in verdicts([fast]))


def test_verdicts_work_without_our_policy() -> None:
    """If it was not run."""
    assert verdicts([ran("one", 10.0), ran("two", 20.0)])[0].endswith("one is best, 10 ms.")


def test_the_page_names_every_policy_and_repeats_the_verdicts(tmp_path: Path) -> None:
    """All ten policies are listed and eight are drawn, including ours even if it is the slowest."""
    names = [f"policy_{number}" for number in range(9)]
    results = [ran(name, 10.0 + at) for at, name in enumerate(names)] + [ran("cost_aware", 900.0)]
    document = page(tmp_path, results)
    assert "some traffic on m" in document
    assert all(name in document for name in (*names, "cost_aware"))
    assert "cost_aware is behind with 900 ms." in document
    figures = document[document.index("<figure") :]
    drawn = figures[: figures.index("</figure>")]
    assert "cost_aware" in drawn and "policy_6" in drawn and "policy_7" not in drawn


def test_the_page_shows_in_how_many_settings_a_policy_is_best_and_what_wrong_coefficients_cost(tmp_path: Path) -> None:
    """Ours is best with the true ones, and three times as slow with wrong ones. No place numbers."""
    off = replace(EASY, compute=0.7)
    results = [ran("cost_aware", 10.0), ran("other", 20.0), ran("cost_aware", 30.0, at=off), ran("other", 20.0, at=off)]
    document = page(tmp_path, results)
    assert "<td>cost_aware</td><td>1 of 1</td><td>1 of 1</td><td>1 of 1</td><td>+200% to +200%</td>" in document
    assert "<td>other</td><td>0 of 1</td><td>0 of 1</td><td>1 of 1</td><td>+0% to +0%</td>" in document
    assert "rank" not in document.lower()
    assert "Robustness" not in page(tmp_path, results[:2])


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
    assert shown(without)[0][-1] == "100.0%"


def test_runs_that_refused_everything_are_shown_as_such(tmp_path: Path) -> None:
    """Without times; a policy that served requests is better."""
    results = [refused("cost_aware"), ran("other", 10.0)]
    assert [row[0] for row in shown(results)] == ["other", "cost_aware"]
    sentences = verdicts(results)
    assert "other is best, 10 ms" in sentences[0]
    assert sentences[2].endswith("cost_aware is behind with 100.0%.")
    assert "100.0%" in page(tmp_path, results)
    assert "some traffic" in page(tmp_path, [refused("cost_aware")])
