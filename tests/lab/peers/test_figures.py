"""Figures come from the pods' counters, and the table marks the best."""

from __future__ import annotations

import pytest

from loadtest.peers.figures import PodTokens, Round, cached_share, cells, imbalance, titles

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
        ttft_mean_ms=2 * p50_ms,
        ttft_p50_ms=p50_ms,
        ttft_p99_ms=200.0,
        imbalance=1.2,
        cpu_ms_per_request=cpu_ms,
        rss_mib=80.0,
    )


TITLES = titles({"ours": [one()]})


def test_a_pods_tokens_are_summed_over_its_ranks() -> None:
    """Cache queries are not prompt tokens; values may have an exponent."""
    assert PodTokens.of_metrics(METRICS) == PodTokens(prompt=1000, cached=400, output=50)


def test_a_round_counts_only_its_own_tokens() -> None:
    """Counters cover the engine's lifetime."""
    assert PodTokens(1000, 400, 50).since(PodTokens(600, 300, 20)) == PodTokens(400, 100, 30)


def test_the_cached_share_is_weighted_by_prompt_tokens() -> None:
    """Not a mean of shares; 0 without requests."""
    assert cached_share([PodTokens(900, 900, 0), PodTokens(100, 0, 5)]) == pytest.approx(0.9)
    assert cached_share([PodTokens(0, 0, 0)]) == 0.0


def test_imbalance_is_the_busiest_pods_work_over_the_mean() -> None:
    """Cached tokens are not work; idle pods count; no work at all is balanced."""
    assert imbalance([PodTokens(500, 400, 100), PodTokens(100, 0, 100)]) == 1.0
    assert imbalance([PodTokens(100, 0, 0), PodTokens(900, 900, 0)]) == 2.0
    assert imbalance([PodTokens(0, 0, 0)] * 3) == 1.0


def test_a_row_shows_medians_and_the_sum_of_errors() -> None:
    """One bad round does not change the median, but its errors show."""
    rounds = [one(p50_ms=50.0), one(p50_ms=60.0), one(p50_ms=900.0, errors=7)]
    (row,) = cells({"us": rounds}, "{}")
    shown = dict(zip(TITLES, row, strict=True))
    assert (shown["router"], shown["TTFT mean ms"], shown["p50 ms"], shown["errors"]) == ("us", "120", "60", "7")


def test_the_share_of_the_ideal_is_computed_per_round() -> None:
    """Each round has its own ideal."""
    (row,) = cells({"us": [one(0.4, 0.8), one(0.5, 0.5), one(0.9, 0.9)]}, "{}")
    assert row[TITLES.index("of ideal")] == "100%"


def test_routers_whose_ranges_over_the_rounds_overlap_are_tied() -> None:
    """The medians differ, and the difference may be chance; the third router is behind in every round."""
    us, them, last = ([one(p50_ms=ms) for ms in times] for times in ((40, 50, 70), (45, 60, 80), (90, 95, 99)))
    rows = cells({"us": us, "them": them, "last": last}, "<{}>")
    assert [row[TITLES.index("p50 ms")] for row in rows] == ["<50>", "<60>", "95"]
