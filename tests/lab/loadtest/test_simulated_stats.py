"""Which policy is better is decided seed by seed, and a difference that may be chance is a tie."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.outcome import RunFigures
from loadtest.studies.simulated_stats import best_policies, is_tied, margin_of, spread_of
from tests.lab.simulated_runs import EASY, ran
from tests.lab.simulated_runs import over_seeds as seeds


def mean_ms(of: RunFigures) -> float:
    return of.ttft_mean_ms


def test_a_difference_that_every_seed_shows_is_no_tie() -> None:
    """The seeds differ by 100 ms, the policies by 5 ms in each of them. Arrivals are the same under both."""
    by_policy = {"slow": seeds("slow", 105.0, 205.0, 305.0), "fast": seeds("fast", 100.0, 200.0, 300.5)}
    assert list(best_policies(by_policy, mean_ms)) == ["fast"]


def test_a_difference_that_may_be_chance_is_a_tie() -> None:
    """`b` has the lowest mean. `a` is better in one seed of three; `c` is worse in each by about the same."""
    by_policy = {
        "a": seeds("a", 95.0, 120.0, 130.0),
        "b": seeds("b", 100.0, 101.0, 102.0),
        "c": seeds("c", 118.0, 120.0, 121.0),
    }
    found = best_policies(by_policy, mean_ms)
    assert list(found) == ["b", "a"]
    assert (found["a"].low, found["a"].mean, found["a"].high) == (95.0, 115.0, 130.0)


def test_an_interval_is_that_of_student() -> None:
    """Three values with a standard deviation of 10 ms: 4.303 * 10 / sqrt(3). One value has none."""
    assert spread_of(seeds("a", 90.0, 100.0, 110.0), mean_ms).margin == pytest.approx(24.84, abs=0.01)
    assert spread_of(seeds("a", 90.0), mean_ms).margin == math.inf


@given(count=st.integers(2, 40), seed=st.integers(0, 1000))
def test_the_interval_covers_the_mean_of_normal_values(count: int, seed: int) -> None:
    """In 95 % of 2,000 samples, give or take three standard errors; also beyond the tabulated quantiles."""
    samples = np.random.default_rng(seed).normal(0.0, 1.0, (2000, count))
    covered = sum(abs(sample.mean()) <= margin_of(sample.tolist()) for sample in samples)
    assert covered / 2000 == pytest.approx(0.95, abs=0.016)


def test_policies_without_a_common_seed_are_tied_only_by_their_means() -> None:
    """Without pairs there is no difference to measure."""
    other = [ran("b", ms, at=replace(EASY, seed=seed)) for seed, ms in ((7, 100.0), (8, 300.0))]
    assert not is_tied(other, seeds("a", 100.0, 150.0), mean_ms)


def test_single_runs_are_tied_within_one_percent() -> None:
    """They have no range; equal policies are in the order of their names."""
    by_policy = {"c": seeds("c", 102.0), "b": seeds("b", 100.0), "a": seeds("a", 100.0), "d": seeds("d", 100.9)}
    assert list(best_policies(by_policy, mean_ms)) == ["a", "b", "d"]


def test_a_spread_covers_the_seeds_that_have_the_figure() -> None:
    """Without any it is NaN."""
    assert spread_of(seeds("a", 10.0, math.nan, 30.0), lambda f: f.ttft_mean_ms).mean == 20.0
    assert math.isnan(spread_of([], lambda f: f.ttft_mean_ms).mean)
