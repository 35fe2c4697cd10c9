"""A plan is the smallest fleet that meets the SLO, and its savings match the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.capacity_plan import Variant, plan, smallest_that, variants
from loadtest.simulator.compare import Experiment, Setting
from loadtest.simulator.generate import Kind, TrafficMix
from loadtest.simulator.scenario import FleetSpec, LinkSpec, PodsSpec
from loadtest.simulator.traffic import Traffic
from router.admission.tenant import Slo
from router.config.load import shipped
from router.config.models import load_priors
from router.policy.spec import Policy
from router.types import PodSpeed
from tests.kit.worlds import prior, small_mix


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 150))
def test_the_fewest_equals_a_linear_search(needed: int, least: int, most: int) -> None:
    """With far fewer calls, each of which is a run."""
    tried: list[int] = []

    def enough(pods: int) -> bool:
        tried.append(pods)
        return pods >= needed

    expected = next((pods for pods in range(least, most + 1) if pods >= needed), None)
    assert smallest_that(enough, least, most) == expected
    assert all(pods <= most for pods in tried) and len(tried) <= 2 * most.bit_length() + 1
    assert expected is None or expected in tried


def test_variants_are_the_policies_then_a_tier_then_disaggregated() -> None:
    """The last only with a link, the tier only if it is requested."""
    names = [one.name for one in variants("cost_aware", ["round_robin"], 3_000_000, has_link=True)]
    tier, apart = "cost_aware, 3M tokens of DRAM", "cost_aware_pd, prefill apart"
    assert names == ["round_robin", "cost_aware", tier, apart]
    assert [one.name for one in variants("cost_aware", [], 0, has_link=False)] == ["cost_aware"]


@pytest.fixture
def setup(policies: dict[str, Policy]) -> Experiment:
    """A fleet that needs more than one pod for this traffic, an SLO, and a link."""
    group = PodsSpec(count=1, hardware="h", kv_tokens=20_000, gpus=2)
    fleet = FleetSpec(model="m", pods=(group,), link=LinkSpec(t0_ms=0.5, gb_per_s=10.0))
    slo = Slo(ttft_ms=400.0, tpot_ms=50.0)
    mix = small_mix(10.0)
    return Experiment(fleet, prior, policies, lambda load, seed: mix.traffic(speedup=4 * load, seed=seed), slo)


def share(setup: Experiment, policy: str, pods: int) -> float:
    return setup.run(Setting(policy, 1.0, pods)).figures.slo_share


def test_a_plan_is_enough_and_one_pod_less_is_not(setup: Experiment) -> None:
    """Checked by runs of the same world."""
    found = plan(setup, 0.95, 16, Variant("ours", "cost_aware"))
    assert found is not None and 1 < found.pods < 16
    assert found.figures.slo_share == share(setup, "cost_aware", found.pods) >= 0.95
    assert share(setup, "cost_aware", found.pods - 1) < 0.95
    assert (found.gpus, found.layout) == (2 * found.pods, "")
    assert found.computed_tokens == found.figures.prompt_tokens - found.figures.cached_tokens


def test_there_is_no_plan_if_max_pods_are_too_few(setup: Experiment) -> None:
    """The result is None."""
    assert plan(setup, 0.95, 1, Variant("ours", "cost_aware")) is None


def test_disaggregation_needs_two_pods_and_reports_its_layout(setup: Experiment) -> None:
    """There is no plan with one pod."""
    apart = Variant("apart", "cost_aware", disaggregated=True)
    found = plan(setup, 0.5, 8, apart)
    assert found is not None and found.pods >= 2
    prefill, decode = (int(part.split()[0]) for part in found.layout.split(", "))
    assert prefill >= 1 and decode >= 1 and prefill + decode == found.pods
    assert plan(setup, 0.0, 1, apart) is None


def test_a_dram_tier_computes_less_with_the_same_pods(setup: Experiment) -> None:
    """Blocks that the GPU evicted are loaded instead."""
    group = setup.fleet.pods[0].model_copy(update={"kv_tokens": 4000})
    small = replace(setup, fleet=setup.fleet.model_copy(update={"pods": (group,)}), slo=Slo())
    without = plan(small, 0.5, 1, Variant("ours", "cost_aware", cpu_kv_tokens=0))
    tier = plan(small, 0.5, 1, Variant("tier", "cost_aware", cpu_kv_tokens=500_000))
    assert without is not None and tier is not None
    assert tier.computed_tokens < without.computed_tokens


def seventy(model: str, hardware: str) -> tuple[PodSpeed, int]:
    row = load_priors(shipped("config") / "models")[model]
    return row.hardware[hardware].speed(), row.kv_bytes_per_token


def test_a_shared_system_prompt_saves_as_in_the_worked_example(policies: dict[str, Policy]) -> None:
    """2,000 tokens of system prompt and 300 of a user, 10,000 times an hour, for 18 minutes: 2300 / 300 = 7.7 times
    fewer prompt tokens are computed (docs/simulator.md#what-is-checked), except for the first request on each pod."""
    chat = Kind(prefixes=1, prefix_tokens=(2000, 2000), first_tokens=(300, 300), output_tokens=(1, 1))
    mix = TrafficMix(sessions_per_s=10_000 / 3600, duration_s=1080, kinds={"chat": chat}, block_size_tokens=16)

    def traffic(load: float, seed: int) -> Traffic:
        return mix.traffic(speedup=load, seed=seed)

    fleet = FleetSpec(model="llama-3.1-70b", pods=(PodsSpec(count=2, hardware="h100x4", kv_tokens=461_376, gpus=4),))
    setup = Experiment(fleet, seventy, policies, traffic)
    figures = setup.run(Setting("cost_aware", 1.0, 2)).figures
    uncached = figures.prompt_tokens
    assert figures.requests == pytest.approx(3000, rel=0.05)
    assert uncached == figures.requests * 2300
    assert uncached / (uncached - figures.cached_tokens) == pytest.approx(2300 / 300, rel=0.01)
