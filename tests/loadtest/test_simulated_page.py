"""The page shows the results of runs, including those where our policy is not the best."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.simulator.compare import Result
from loadtest.studies.simulated_page import verdicts, write_report
from tests.cli.simulated_runs import EASY, SLO, over_seeds, ran, refused


def page(folder: Path, results: Sequence[Result]) -> str:
    path = folder / "page.html"
    write_report(path, results, "m", SLO, "some traffic")
    return path.read_text()


def test_every_column_is_explained(tmp_path: Path) -> None:
    """Below the heading of the figures."""
    document = page(tmp_path, [*over_seeds("cost_aware", 20.0, 30.0), *over_seeds("other", 20.0, 30.0)])
    header = re.findall("<th>(.*?)</th>", document[: document.index("</tr>")])
    assert header[1:] == re.findall("<dt>(.*?)</dt>", document) and len(header) == 11
    assert "<td>25 (20\u201330)</td>" in document


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


def test_the_page_shows_in_how_many_settings_a_policy_is_best(tmp_path: Path) -> None:
    """Ours is best at one load of two. No place numbers."""
    hard = replace(EASY, load=2.0)
    results = [
        ran("cost_aware", 10.0),
        ran("other", 20.0),
        ran("cost_aware", 30.0, at=hard),
        ran("other", 20.0, at=hard),
    ]
    document = page(tmp_path, results)
    assert "<td>cost_aware</td><td>1 of 2</td><td>1 of 2</td><td>2 of 2</td>" in document
    assert "<td>other</td><td>1 of 2</td><td>1 of 2</td><td>2 of 2</td>" in document
    assert "rank" not in document.lower()
    assert "Robustness" not in page(tmp_path, results[:2])


@pytest.mark.parametrize(("loads", "drawn"), [((1.0,), False), ((1.0, 2.0), True)], ids=["one load", "two loads"])
def test_goodput_is_drawn_over_several_loads(tmp_path: Path, loads: Sequence[float], drawn: bool) -> None:
    """The page of a single run has the other plots."""
    document = page(tmp_path, [ran("cost_aware", 10.0, at=replace(EASY, load=load)) for load in loads])
    assert ("Goodput at the SLO" in document) is drawn
    assert "Time to first token at load" in document


def test_regret_is_drawn_only_if_it_was_computed(tmp_path: Path) -> None:
    """At an interval of decisions."""
    without = [ran("cost_aware", 10.0, regret_ms=float("nan"))]
    assert "share of decisions" in page(tmp_path, [ran("cost_aware", 10.0)])
    assert "share of decisions" not in page(tmp_path, without)


def test_runs_that_refused_everything_are_shown_as_such(tmp_path: Path) -> None:
    """Without times; a policy that served requests is better."""
    results = [refused("cost_aware"), ran("other", 10.0)]
    sentences = verdicts(results)
    assert "other is best, 10 ms" in sentences[0]
    assert sentences[2].endswith("cost_aware is behind with 100.0%.")
    assert "100.0%" in page(tmp_path, results)
    assert "some traffic" in page(tmp_path, [refused("cost_aware")])
