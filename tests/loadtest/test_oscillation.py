"""What counts as an oscillation of backlogs, and when a fleet is back after a burst."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from loadtest.simulator.outcome import RequestOutcome, Run
from loadtest.simulator.scenario import Conditions
from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from loadtest.simulator.world import World
from loadtest.studies.oscillation import SampledWorld, back_after_s, parts_of, waves_of, with_burst
from tests.kit.scenes import policy
from tests.sim.virtual.worlds import BLOCK, fleet, prompt, traffic

PODS = 8
REQUEST = TrafficRequest(100, 1, (1,), 1)


def decaying(samples: int, kept: float, seed: int) -> NDArray[np.float64]:
    """Backlogs that only drain: each second a share is left, and new work comes."""
    random = np.random.default_rng(seed)
    backlogs = np.zeros((samples, PODS))
    for at in range(1, samples):
        backlogs[at] = kept * backlogs[at - 1] + random.exponential(100, PODS)
    return backlogs


@pytest.mark.parametrize("period_s", [6, 15, 40])
def test_backlogs_that_swing_from_pod_to_pod_oscillate(period_s: int) -> None:
    seconds, phases = np.arange(480)[:, None], np.arange(PODS) * 2 * math.pi / PODS
    swinging = decaying(480, 0.8, 1) + 300 * np.sin(2 * math.pi * seconds / period_s + phases)
    waves = waves_of(swinging)
    assert waves.oscillates
    assert waves.line > 5 and waves.line_s == pytest.approx(period_s, rel=0.15)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", range(3))
def test_backlogs_that_only_drain_do_not_oscillate(kept: float, seed: int) -> None:
    waves = waves_of(decaying(480, kept, seed))
    assert not waves.oscillates
    assert waves.line < 3


def test_a_swing_of_the_whole_fleet_is_the_arrivals_and_not_the_routing() -> None:
    swing = 1000 * np.sin(np.arange(480)[:, None] / 5) + np.zeros(PODS)
    assert not waves_of(decaying(480, 0.8, 1) + swing).oscillates
    assert math.isnan(waves_of(swing).band)


def test_a_burst_compresses_the_arrivals_of_two_minutes() -> None:
    traffic = Traffic(16, [Session(float(at), (REQUEST,)) for at in range(0, 3600, 10)])
    starts = [one.start_s for one in with_burst(traffic, 2.0, 10.0).sessions]
    assert [sum(begin <= one < begin + 120 for one in starts) for begin in (0, 480, 600, 720)] == [24, 24, 120, 24]
    assert [one.start_s for one in with_burst(traffic, 2.0, 0.0).sessions] == [at / 2 for at in range(0, 3600, 10)]


def test_the_fleet_is_back_after_the_last_slow_window() -> None:
    """Steady at 100 ms; slow for 95 s after the burst, a window of which is the fourth."""
    outcomes = [
        RequestOutcome("any", at * 1000.0, 100, 1, ttft_ms=500.0 if 600 <= at < 815 else 100.0) for at in range(1200)
    ]
    run, backlogs_ms = Run(outcomes, {}, 1.2e6, 0), [[0.0, 1.0]] * 1300
    assert back_after_s(run) == 120
    assert {part: len(samples) for part, samples in parts_of(run, backlogs_ms, 10.0).items()} == {
        "steady": 480,
        "after the burst": 479,
    }
    assert len(parts_of(run, backlogs_ms, 0.0)["steady"]) == 1079


def test_backlogs_are_recorded_and_change_nothing() -> None:
    """One pod gets a prompt of 2,002 ms, and is idle afterwards."""
    sessions = Session(0.0, (prompt(1, 20_000),)), Session(10.0, (prompt(2, 100),))
    sampled, plain = (
        kind(fleet(2), policy("queue"), Conditions(), block_size_tokens=BLOCK) for kind in (SampledWorld, World)
    )
    assert sampled.run(traffic(*sessions)).outcomes == plain.run(traffic(*sessions)).outcomes
    assert isinstance(sampled, SampledWorld)
    assert [len(row) for row in sampled.backlogs_ms[:10]] == [2] * 10
    assert max(sampled.backlogs_ms[1]) > 1000 and min(sampled.backlogs_ms[1]) == 0
    assert max(sampled.backlogs_ms[8]) == 0
