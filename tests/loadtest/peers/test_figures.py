"""Do the figures say what the pods counted, and does the table show who was best?"""

from __future__ import annotations

import pytest

from loadtest.peers.figures import TITLES, PodTokens, Round, cached_share, cells, imbalance, markdown, table

METRICS = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="demo",engine="0"} 700.0
vllm:prompt_tokens_total{model_name="demo",engine="1"} 300.0
vllm:prefix_cache_queries_total{model_name="demo",engine="0"} 5000.0
vllm:prefix_cache_hits_total{model_name="demo",engine="0"} 4.0e+02
vllm:generation_tokens_total{model_name="demo",engine="0"} 50.0
"""


def one(cached: float = 0.5, ideal: float = 0.8, p50_ms: float = 50.0, cpu_ms: float = 1.0, errors: int = 0) -> Round:
    return Round(
        requests=100,
        errors=errors,
        cached_share=cached,
        ideal_share=ideal,
        ttft_p50_ms=p50_ms,
        ttft_p99_ms=200.0,
        imbalance=1.2,
        cpu_ms_per_request=cpu_ms,
        rss_mib=80.0,
    )


def test_a_pods_tokens_are_summed_over_its_ranks_and_nothing_else_is_read() -> None:
    """Queries are no prompt tokens; a value may be written with an exponent."""
    assert PodTokens.of_metrics(METRICS) == PodTokens(prompt=1000, cached=400, output=50)


def test_a_pod_without_counters_has_done_nothing() -> None:
    """An engine that has just begun need not have them."""
    assert PodTokens.of_metrics("# nothing yet\n") == PodTokens(0, 0, 0)


def test_what_came_before_a_round_is_not_of_the_round() -> None:
    """Counters are of the engine's life."""
    assert PodTokens(1000, 400, 50).since(PodTokens(600, 300, 20)) == PodTokens(400, 100, 30)


def test_the_cached_share_weighs_pods_by_their_prompts() -> None:
    """Not a mean of shares; 0 where nothing was asked."""
    assert cached_share([PodTokens(900, 900, 0), PodTokens(100, 0, 5)]) == pytest.approx(0.9)
    assert cached_share([PodTokens(0, 0, 0)]) == 0.0


def test_imbalance_is_the_busiest_pods_work_over_the_mean() -> None:
    """Cached tokens are no work; idle pods count; no work at all is balanced."""
    assert imbalance([PodTokens(500, 400, 100), PodTokens(100, 0, 100)]) == 1.0
    assert imbalance([PodTokens(100, 0, 0), PodTokens(900, 900, 0)]) == 2.0
    assert imbalance([PodTokens(0, 0, 0)] * 3) == 1.0


def test_a_row_shows_medians_but_every_rounds_errors() -> None:
    """One bad round does not move the median, and does not hide either."""
    rounds = [one(p50_ms=50.0), one(p50_ms=60.0), one(p50_ms=900.0, errors=7)]
    (row,) = cells({"us": rounds}, "{}")
    shown = dict(zip(TITLES, row, strict=True))
    assert (shown["router"], shown["TTFT p50 ms"], shown["errors"]) == ("us", "60", "7")


def test_the_share_of_the_ideal_is_taken_in_each_round() -> None:
    """Each round has its own ideal: a median of cached over a median of ideal would mix them."""
    (row,) = cells({"us": [one(0.4, 0.8), one(0.5, 0.5), one(0.9, 0.9)]}, "{}")
    assert row[TITLES.index("of ideal")] == "100%"


def test_the_best_of_a_column_is_marked_whoever_it_is_and_ties_share_it() -> None:
    """More is better for hits, less for everything else."""
    us, them = cells({"us": [one(cached=0.9, cpu_ms=4.0)], "them": [one(cached=0.5, cpu_ms=2.0)]}, "<{}>")
    at = TITLES.index
    assert (us[at("cached")], them[at("cached")]) == ("<90.0%>", "50.0%")
    assert (us[at("CPU ms/req")], them[at("CPU ms/req")]) == ("4.00", "<2.00>")
    assert us[at("p99 ms")] == them[at("p99 ms")] == "<200>"


def test_no_errors_are_nothing_to_boast_of() -> None:
    """That column has no winner."""
    (row,) = cells({"us": [one()]}, "<{}>")
    assert row[TITLES.index("errors")] == "0"


def test_terminal_and_readme_show_the_same_rows() -> None:
    """A row a router, in the order given."""
    rounds = {"us": [one()], "them": [one(cached=0.6)]}
    lines = markdown(rounds).splitlines()
    assert [line.split(" | ")[0] for line in lines[:4]] == ["| router", "| ---", "| us", "| them"]
    assert table(rounds, "title").row_count == 2
