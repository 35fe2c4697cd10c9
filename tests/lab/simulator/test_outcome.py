"""The figures of a run summarize its outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.outcome import PodUse, RequestOutcome, Run, RunFigures, figures
from router.admission.tenant import Slo


def served(ttft_ms: float, **facts: object) -> RequestOutcome:
    """An answer of one token."""
    one = RequestOutcome("any", 0.0, 100, 1, pod="a", ttft_ms=ttft_ms, e2e_ms=ttft_ms)
    for name, value in facts.items():
        setattr(one, name, value)
    return one


REFUSED = RequestOutcome("any", 0.0, 100, 1, refused="NoReadyPod")
IDLE = PodUse(0, 0, 0.0, 0)


def of(outcomes: Sequence[RequestOutcome], slo: Slo = Slo(), duration_ms: float = 1000.0, ideal: int = 0) -> RunFigures:  # noqa: B008
    return figures(Run(outcomes, {"a": IDLE}, duration_ms, ideal), slo)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_the_nearest_rank(values: list[float]) -> None:
    """The smallest value that the given share does not exceed; never an interpolated one."""
    found = of([served(value) for value in values])
    ranked = sorted(values)
    for percent, value in ((50, found.ttft_p50_ms), (90, found.ttft_p90_ms), (99, found.ttft_p99_ms)):
        assert value == ranked[max(math.ceil(len(values) * percent / 100), 1) - 1]


def test_time_per_token_is_counted_after_the_first() -> None:
    """It is 0 for an answer of one token."""
    assert served(100.0, e2e_ms=190.0, output_tokens=10).tpot_ms == 10.0
    assert served(100.0).tpot_ms == 0.0


def test_a_request_meets_the_slo_if_both_times_do() -> None:
    """Limits included."""
    slo = Slo(ttft_ms=100.0, tpot_ms=10.0)
    good = served(100.0, e2e_ms=200.0, output_tokens=11)
    late = served(100.1, e2e_ms=200.0, output_tokens=11)
    slow = served(100.0, e2e_ms=201.0, output_tokens=11)
    found = of([good, late, slow, good], slo, duration_ms=500.0)
    assert (found.slo_share, found.goodput_per_s) == (0.5, 4.0)


def test_a_refused_request_counts_as_an_slo_miss_only() -> None:
    """Its tokens and times are in no other figure."""
    found = of([served(50.0, cached_tokens=40), REFUSED])
    assert (found.requests, found.refused, found.slo_share) == (2, 1, 0.5)
    assert (found.prompt_tokens, found.cached_share, found.ttft_mean_ms, found.ttft_p99_ms) == (100, 0.4, 50.0, 50.0)
    assert found.predictions_exact_share == 0.0


def test_a_run_with_refusals_only_has_figures() -> None:
    """Times are NaN, shares are not."""
    found = of([REFUSED])
    assert (found.slo_share, found.cached_share, found.goodput_per_s) == (0.0, 0.0, 0.0)
    assert math.isnan(found.ttft_mean_ms) and math.isnan(found.ttft_p99_ms)


def test_a_run_without_requests_has_figures() -> None:
    """No division by zero."""
    found = figures(Run([], {"a": IDLE}, 0.0, 0), Slo())
    assert (found.requests, found.slo_share, found.peak_over_mean, found.busy_share) == (0, 0.0, 1.0, 0.0)


def test_cached_shares_are_weighted_by_tokens() -> None:
    """In total and by kind."""
    outcomes = [
        served(1.0, kind="chat", prompt_tokens=100, cached_tokens=90),
        served(1.0, kind="chat", prompt_tokens=300, cached_tokens=30),
        served(1.0, kind="rag", prompt_tokens=600, cached_tokens=0),
    ]
    found = of(outcomes, ideal=240)
    assert (found.cached_share, found.of_ideal) == (0.12, 0.5)
    assert found.cached_share_by_kind == {"chat": 0.3, "rag": 0.0}


def test_the_share_of_an_ideal_of_zero_is_one() -> None:
    """Traffic without shared prefixes is no failure."""
    assert of([served(1.0)]).of_ideal == 1.0


def test_work_is_compared_by_computed_tokens_and_time_by_busy_ms() -> None:
    """The busiest pod relative to the mean; idle pods count."""
    pods = {"a": PodUse(3, 300, 500.0, 1), "b": PodUse(1, 100, 250.0, 2), "c": PodUse(0, 0, 0.0, 0)}
    found = figures(Run([served(1.0)], pods, 1000.0, 0), Slo())
    assert found.peak_over_mean == pytest.approx(300 / (400 / 3))
    assert found.busy_share == pytest.approx(0.25)
    assert found.preemptions == 3


def test_regret_is_the_mean_of_the_decisions_that_have_one() -> None:
    """NaN without any."""
    assert of([served(1.0, regret_ms=10.0), served(1.0, regret_ms=20.0), served(1.0)]).regret_mean_ms == 15.0
    assert math.isnan(of([served(1.0)]).regret_mean_ms)


def test_a_prediction_is_exact_to_the_token() -> None:
    """One in three here."""
    right = served(1.0, cached_tokens=64, predicted_cached_tokens=64)
    more = served(1.0, cached_tokens=80, predicted_cached_tokens=64)
    less = served(1.0, cached_tokens=48, predicted_cached_tokens=64)
    assert of([right, more, less]).predictions_exact_share == pytest.approx(1 / 3)


def test_a_long_prompt_may_take_a_multiple_of_its_idle_prefill() -> None:
    """Where the SLO says so."""
    slo = Slo(ttft_ms=100.0, idle_prefills=3.0)
    assert of([served(300.0, idle_prefill_ms=100.0), served(300.0, idle_prefill_ms=99.0)], slo).slo_share == 0.5
