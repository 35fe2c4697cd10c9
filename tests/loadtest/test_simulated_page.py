"""The page shows the results of runs, including those where our policy is not the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.simulator.compare import Result
from loadtest.studies.simulated_page import verdicts, write_report
from tests.cli.simulated_runs import EASY, SLO, ran, refused


def page(folder: Path, results: Sequence[Result]) -> str:
    path = folder / "page.html"
    write_report(path, results, "m", SLO, "some traffic")
    return path.read_text()


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


def test_runs_that_refused_everything_are_shown_as_such(tmp_path: Path) -> None:
    """Without times; a policy that served requests is better."""
    results = [refused("cost_aware"), ran("other", 10.0)]
    sentences = verdicts(results)
    assert "other is best, 10 ms" in sentences[0]
    assert sentences[2].endswith("cost_aware is behind with 100.0%.")
    assert "100.0%" in page(tmp_path, results)
    assert "some traffic" in page(tmp_path, [refused("cost_aware")])
