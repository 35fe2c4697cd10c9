"""Runs are compared over all combinations and summarized."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from loadtest.simulator.admission_rules import Admission, Rule
from loadtest.simulator.compare import (
    QUANTILES,
    Experiment,
    Result,
    Setting,
    grid,
    in_order_of_mean,
    mean_of,
    summarize,
)
from loadtest.simulator.outcome import PodUse, RequestOutcome, Run, figures
from loadtest.simulator.scenario import BelievedSpec, FleetSpec, PodsSpec
from router.admission.tenant import Slo
from router.policy.spec import Policy
from tests.kit.worlds import prior, small_mix


def result(setting: Setting, ttft_ms: float) -> Result:
    """The result of a run with one request."""
    one = RequestOutcome("any", 0.0, 10, 1, ttft_ms=ttft_ms, e2e_ms=ttft_ms)
    return summarize(setting, Run([one], {"a": PodUse(1, 10, 1.0, 0)}, 1000.0, 0), Slo(), {})


def test_a_grid_holds_every_combination_once() -> None:
    """2 policies, 3 loads, 2 sizes, 2 seeds."""
    found = grid(["a", "b"], [0.5, 1.0, 2.0], [4, 8], 2)
    assert len(found) == len(set(found)) == 24


def seeds(policy: str, *ttft_ms: float) -> list[Result]:
    """A run of each time, with a seed of its own."""
    return [result(Setting(policy, 1.0, 4, seed), ms) for seed, ms in enumerate(ttft_ms)]


def test_policies_are_in_the_order_of_their_means() -> None:
    """Over the seeds that have the figure; without any the mean is NaN. A policy that served nothing is last."""
    runs = [*seeds("b", 10.0, math.nan, 30.0), *seeds("c", math.nan), *seeds("a", 19.0, 19.0)]
    assert mean_of(runs[:3], lambda f: f.ttft_mean_ms) == 20.0
    assert math.isnan(mean_of([], lambda f: f.ttft_mean_ms))
    assert list(in_order_of_mean(runs)) == ["a", "b", "c"]


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
    found = summarize(Setting("a", 1.0, 2), run, Slo(), {})
    assert found.ttft_ms == pytest.approx(list(range(QUANTILES + 1)))
    assert (found.work_tokens, found.regret_ms, found.duration_s) == ([30, 10], [0.0, 1.0, 2.0], 5.0)
    assert repr(found.figures) == repr(figures(run, Slo()))


def test_a_run_that_refused_everything_has_a_result() -> None:
    """Without a distribution."""
    run = Run([RequestOutcome("any", 0.0, 10, 1, refused="NoReadyPod")], {"a": PodUse(0, 0, 0.0, 0)}, 0.0, 0)
    assert summarize(Setting("a", 1.0, 1), run, Slo(), {}).ttft_ms == []


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
    fleet = experiment.fleet.model_copy(update={"admission": Admission(rule=Rule.QUEUE)})
    experiment, setting = replace(experiment, fleet=fleet, slo=Slo(ttft_ms=1500.0)), Setting("cost_aware", 1.0, 3)
    assert experiment.run(setting).figures.refused == 0
    wrong = fleet.model_copy(update={"believed": BelievedSpec(compute=10.0)})
    assert replace(experiment, fleet=wrong).run(setting).figures.refused > 0
