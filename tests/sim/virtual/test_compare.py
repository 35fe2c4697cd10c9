"""Runs are compared over all combinations, with their spread over seeds, and summarized."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.tenant import Slo
from router.policy.spec import Policy
from router.sim.virtual.admission_rules import Admission, Rule
from router.sim.virtual.compare import (
    QUANTILES,
    Experiment,
    Result,
    Setting,
    best_policies,
    grid,
    is_tied,
    margin_of,
    spread_of,
    summarize,
)
from router.sim.virtual.outcome import PodUse, RequestOutcome, Run, RunFigures, figures
from router.sim.virtual.scenario import BelievedSpec, FleetSpec, PodsSpec
from tests.examples import examples
from tests.sim.virtual.conftest import prior, small_mix


def result(setting: Setting, ttft_ms: float) -> Result:
    """The result of a run with one request."""
    one = RequestOutcome("any", 0.0, 10, 1, ttft_ms=ttft_ms, e2e_ms=ttft_ms)
    return summarize(setting, Run([one], {"a": PodUse(1, 10, 1.0, 0)}, 1000.0, 0), Admission())


def test_a_grid_holds_every_combination_once() -> None:
    """2 policies, 3 loads, 2 sizes, 2 seeds."""
    found = grid(["a", "b"], [0.5, 1.0, 2.0], [4, 8], 2)
    assert len(found) == len(set(found)) == 24


def seeds(policy: str, *ttft_ms: float) -> list[Result]:
    """A run of each time, with a seed of its own."""
    return [result(Setting(policy, 1.0, 4, seed), ms) for seed, ms in enumerate(ttft_ms)]


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


@examples(20)
@given(count=st.integers(2, 40), seed=st.integers(0, 1000))
def test_the_interval_covers_the_mean_of_normal_values(count: int, seed: int) -> None:
    """In 95 % of 2,000 samples, give or take three standard errors; also beyond the tabulated quantiles."""
    samples = np.random.default_rng(seed).normal(0.0, 1.0, (2000, count))
    covered = sum(abs(sample.mean()) <= margin_of(sample.tolist()) for sample in samples)
    assert covered / 2000 == pytest.approx(0.95, abs=0.016)


def test_policies_without_a_common_seed_are_tied_only_by_their_means() -> None:
    """Without pairs there is no difference to measure."""
    other = [result(Setting("b", 1.0, 4, seed), ms) for seed, ms in ((7, 100.0), (8, 300.0))]
    assert not is_tied(other, seeds("a", 100.0, 150.0), mean_ms)


def test_single_runs_are_tied_within_one_percent() -> None:
    """They have no range; equal policies are in the order of their names."""
    by_policy = {"c": seeds("c", 102.0), "b": seeds("b", 100.0), "a": seeds("a", 100.0), "d": seeds("d", 100.9)}
    assert list(best_policies(by_policy, mean_ms)) == ["a", "b", "d"]


def test_a_spread_covers_the_seeds_that_have_the_figure() -> None:
    """Without any it is NaN."""
    assert spread_of(seeds("a", 10.0, math.nan, 30.0), lambda f: f.ttft_mean_ms).mean == 20.0
    assert math.isnan(spread_of([], lambda f: f.ttft_mean_ms).mean)


def test_a_result_has_figures_quantiles_work_and_regret() -> None:
    """Work is in descending order; refused requests are in no distribution."""
    outcomes = [
        RequestOutcome(
            "any", 0.0, 10, 1, ttft_ms=float(ms), e2e_ms=float(ms), regret_ms=float(ms) if ms < 3 else math.nan
        )
        for ms in range(QUANTILES + 1)
    ]
    outcomes.append(RequestOutcome("any", 0.0, 10, 1, refused="NoReadyPod"))
    run = Run(outcomes, {"a": PodUse(1, 10, 1.0, 0), "b": PodUse(1, 30, 1.0, 0)}, 5000.0, 0)
    found = summarize(Setting("a", 1.0, 2), run, Admission())
    assert found.ttft_ms == pytest.approx(list(range(QUANTILES + 1)))
    assert (found.work_tokens, found.regret_ms, found.duration_s) == ([30, 10], [0.0, 1.0, 2.0], 5.0)
    assert repr(found.figures) == repr(figures(run, Slo()))


def test_a_run_that_refused_everything_has_a_result() -> None:
    """Without a distribution."""
    run = Run([RequestOutcome("any", 0.0, 10, 1, refused="NoReadyPod")], {"a": PodUse(0, 0, 0.0, 0)}, 0.0, 0)
    assert summarize(Setting("a", 1.0, 1), run, Admission()).ttft_ms == []


@pytest.fixture
def experiment(policies: dict[str, Policy]) -> Experiment:
    """Two pods, and 10 s of a mix."""
    fleet = FleetSpec(model="m", pods=(PodsSpec(count=2, hardware="h", kv_tokens=50_000),))
    mix = small_mix(10.0)
    return Experiment(fleet, prior, policies, lambda load, seed: mix.traffic(speedup=load, seed=seed))


def test_an_experiment_runs_its_setting(experiment: Experiment) -> None:
    """Pods and load are those of the setting, the result is reproducible, and progress is reported."""
    setting, progress = Setting("cost_aware", 1.0, 3), list[int]()
    found = experiment.run(setting, progress.append)
    assert (found.setting, len(found.work_tokens)) == (setting, 3)
    assert progress == list(range(1, found.figures.requests + 1))
    assert repr(experiment.run(setting)) == repr(found)
    assert experiment.run(replace(setting, load=2.0)).duration_s < found.duration_s
    assert repr(experiment.run(replace(setting, seed=1)).figures) != repr(found.figures)


def test_misjudged_coefficients_reach_the_router(experiment: Experiment) -> None:
    """A router that assumes ten times the compute time refuses requests that it could serve."""
    limits = {"admission": Admission(rule=Rule.QUEUE), "slo": Slo(ttft_ms=1500.0)}
    fleet = experiment.fleet.model_copy(update=limits)
    experiment, setting = replace(experiment, fleet=fleet), Setting("cost_aware", 1.0, 3)
    assert experiment.run(setting).figures.refused == 0
    wrong = fleet.model_copy(update={"believed": BelievedSpec(compute=10.0)})
    assert replace(experiment, fleet=wrong).run(setting).figures.refused > 0
