"""Pods are replaced one after the other, and what becomes of their streams."""

from __future__ import annotations

import pytest

from router.errors import ConfigError
from router.policy.spec import Policy
from router.sim.virtual.outcome import Run
from router.sim.virtual.rolling_world import RollingWorld
from router.sim.virtual.router_view import RouterSettings
from router.sim.virtual.scenario import Conditions, Rollout, SimulatedFleet
from router.sim.virtual.traffic import Traffic
from tests.sim.virtual.conftest import SPEED, small_mix
from tests.sim.virtual.test_world import assert_all_ended
from tests.sim.virtual.worlds import BLOCK, LINK, apart, at, fleet, prompt, traffic

STEP_MS = SPEED.step_ms(1, 0)
"""About that of a decode step alone: each token of context adds little."""


def rolled(
    of: SimulatedFleet,
    policy: Policy,
    sessions: Traffic,
    rollout: Rollout,
    *,
    routers: int = 1,
    overhead_ms: float = 0.0,
) -> tuple[RollingWorld, Run]:
    conditions = Conditions(routers=routers, route_ms=0.0, event_delay_ms=0.0, overhead_ms=overhead_ms, rollout=rollout)
    settings = RouterSettings(continues=rollout.continues)
    asked = RollingWorld(of, policy, conditions, routers=settings, block_size_tokens=BLOCK)
    return asked, asked.run(sessions)


def long_answers() -> Traffic:
    return traffic(*(at(0.4 * number, prompt(number, 400 + 10 * number, 900)) for number in range(60)))


def test_streams_move_and_none_is_cut(policies: dict[str, Policy]) -> None:
    """The rolling update takes a part of the time in which pods wait for their answers."""
    asked, run = rolled(fleet(4), policies["cost_aware"], long_answers(), Rollout(at_s=5.0, continues=True))
    assert_all_ended(asked, run, 60)
    assert (run.rollout.failed, run.rollout.cut) == (0, 0)
    assert run.rollout.moved >= 4
    _, waited = rolled(fleet(4), policies["cost_aware"], long_answers(), Rollout(at_s=5.0))
    assert (waited.rollout.failed, waited.rollout.cut, waited.rollout.moved) == (0, 0, 0)
    assert run.rollout.minutes < waited.rollout.minutes / 2


def test_a_moved_stream_takes_one_prefill_of_prompt_and_answer_more(policies: dict[str, Policy]) -> None:
    """Its last block is not computed on the other pod, and no token is generated twice."""
    alone = traffic(at(0.0, prompt(1, 1000, 500)))
    asked, run = rolled(fleet(2), policies["cost_aware"], alone, Rollout(at_s=2.0, continues=True))
    assert_all_ended(asked, run, 1)
    (one,) = run.outcomes
    assert run.rollout.moved == 1
    answered = run.rollout.again_tokens - 1000
    assert 2000 / STEP_MS * 0.8 < answered < 2000 / STEP_MS
    prefill_ms = SPEED.prefill_ms(1000 + int(answered))
    assert run.rollout.gap_p50_ms == pytest.approx(prefill_ms)
    _, uncut = rolled(fleet(2), policies["cost_aware"], alone, Rollout(at_s=1e4))
    step_ms = SPEED.step_ms(1, 1000 + answered)
    assert one.e2e_ms == pytest.approx(uncut.outcomes[0].e2e_ms + prefill_ms - step_ms, abs=0.1)
    assert one.ttft_ms == uncut.outcomes[0].ttft_ms


def test_streams_are_cut_when_the_time_of_their_pod_is_over(policies: dict[str, Policy]) -> None:
    """Later requests of their sessions are not sent; requests without a token go to another pod."""
    sessions = [at(0.0, prompt(number, 400, 2000), prompt(number, 500)) for number in range(4)]
    asked, run = rolled(fleet(2), policies["least_load"], traffic(*sessions), Rollout(at_s=1.0, drain_timeout_s=2.0))
    assert run.rollout.cut == 4 and run.rollout.failed == 0
    assert run.unsent == 4
    assert all(not view.ledger.own() for view in asked.views)


def test_a_new_pod_is_cold_and_its_router_knows_that(policies: dict[str, Policy]) -> None:
    """A prompt that was cached is computed again on a pod that has been replaced, as predicted."""
    sessions = [at(second, prompt(1, 1601)) for second in (0.0, 5.0, 15.0)]
    _, run = rolled(fleet(1), policies["cost_aware"], traffic(*sessions), Rollout(at_s=10.0, start_s=1.0))
    assert [one.cached_tokens for one in run.outcomes] == [0, 1600, 0]
    assert [one.predicted_cached_tokens for one in run.outcomes] == [0, 1600, 0]


def test_no_request_fails_while_a_pod_is_away(policies: dict[str, Policy]) -> None:
    """Under mixed traffic to three routers, with an engine's overhead."""
    for continues in (False, True):
        asked, run = rolled(
            fleet(3),
            policies["cost_aware"],
            small_mix(60.0).traffic(),
            Rollout(at_s=5.0, start_s=10.0, continues=continues),
            routers=3,
            overhead_ms=20.0,
        )
        assert_all_ended(asked, run, len(run.outcomes))
        assert (run.rollout.failed, run.rollout.cut) == (0, 0)
        assert 0.5 <= run.rollout.minutes < 1.0
        assert 0 < run.rollout.ttft_p50_ms <= run.rollout.ttft_p99_ms


def test_a_rolling_update_of_prefill_pods_is_refused(policies: dict[str, Policy]) -> None:
    with pytest.raises(ConfigError, match=r"conditions\.rollout: prefill and decode pods"):
        rolled(apart(1, 1, LINK), policies["cost_aware"], traffic(), Rollout(at_s=1.0))
