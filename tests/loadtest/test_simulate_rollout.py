"""Simulated pods are replaced one after the other, and what becomes of their streams."""

from __future__ import annotations

import pytest

from loadtest.simulator.outcome import Run
from loadtest.simulator.scenario import Conditions, SimulatedFleet
from loadtest.simulator.traffic import Traffic
from loadtest.studies.simulate_rollout import Figures, RollingWorld, Rollout, main
from router.config.policy_files import policy_spec
from router.policy.spec import Policy
from tests.kit.scenes import policy
from tests.sim.virtual.conftest import SPEED, small_mix
from tests.sim.virtual.test_world import assert_all_ended
from tests.sim.virtual.worlds import BLOCK, at, fleet, prompt, traffic

COSTS = policy("queue", "prefill", "decode")
AT_ONCE = Conditions(route_ms=0.0, event_delay_ms=0.0)


def rolled(
    of: SimulatedFleet, sessions: Traffic, rollout: Rollout, conditions: Conditions = AT_ONCE, by: Policy = COSTS
) -> tuple[RollingWorld, Run, Figures]:
    asked = RollingWorld(of, by, conditions, block_size_tokens=BLOCK, rollout=rollout)
    run = asked.run(sessions)
    return asked, run, asked.figures(run)


def long_answers() -> Traffic:
    return traffic(*(at(0.4 * number, prompt(number, 400 + 10 * number, 900)) for number in range(60)))


def test_streams_move_and_none_is_cut() -> None:
    """The rolling update takes a part of the time in which pods wait for their answers. Streams move as often as
    needed, also back to a pod that is another one by then."""
    asked, run, moved = rolled(fleet(4), long_answers(), Rollout(at_s=5.0, continues=True))
    assert_all_ended(asked, run, moved.answers)
    assert (moved.failed, moved.cut) == (0, 0)
    assert moved.moved >= 4
    _, _, waited = rolled(fleet(4), long_answers(), Rollout(at_s=5.0))
    assert (waited.failed, waited.cut, waited.moved, waited.again_tokens) == (0, 0, 0, 0)
    assert moved.minutes < waited.minutes / 2


def test_moves_hardly_delay_the_first_tokens_of_others() -> None:
    """The pod that was replaced last gets its share of new and moved streams, and no more."""
    answers = traffic(*(at(number / 12, prompt(number, 300 + number * 37 % 400, 900)) for number in range(500)))
    cost_aware = policy_spec("cost_aware").build()
    _, _, moved = rolled(fleet(5), answers, Rollout(at_s=15.0, continues=True), by=cost_aware)
    assert moved.moved > 60
    assert moved.ttft_ms[1] < 1.5 * moved.ttft_before_ms[1]
    assert moved.gap_ms[1] < 250


def test_a_moved_stream_takes_one_prefill_of_prompt_and_answer_more() -> None:
    """No token is generated twice."""
    alone = traffic(at(0.0, prompt(1, 1000, 500)))
    asked, run, moved = rolled(fleet(2), alone, Rollout(at_s=2.0, continues=True))
    assert_all_ended(asked, run, 1)
    assert moved.moved == 1
    answered = moved.again_tokens - 1000
    assert 180 < answered < 240  # of 8 ms, after a prefill of 103 ms, in two seconds
    prefill_ms, step_ms = SPEED.prefill_ms(1000 + answered), SPEED.step_ms(1, 1000 + answered)
    assert moved.gap_ms[0] == pytest.approx(prefill_ms, abs=0.1)
    _, uncut, _ = rolled(fleet(2), alone, Rollout(at_s=1e4))
    assert run.outcomes[0].ttft_ms == uncut.outcomes[0].ttft_ms
    assert run.outcomes[0].e2e_ms == pytest.approx(uncut.outcomes[0].e2e_ms + prefill_ms - step_ms, abs=0.1)


def test_streams_are_cut_when_the_time_of_their_pod_is_over() -> None:
    """Later requests of their sessions are not sent."""
    sessions = [at(0.0, prompt(number, 400, 2000), prompt(number, 500)) for number in range(4)]
    asked, run, cut = rolled(fleet(2), traffic(*sessions), Rollout(at_s=1.0, drain_timeout_s=2.0))
    assert (cut.cut, cut.failed, run.unsent) == (4, 0, 4)
    assert all(not view.ledger.own() for view in asked.views)


def test_requests_without_a_token_go_to_another_pod_when_the_time_of_theirs_is_over() -> None:
    """One of two long prompts is computed twice, in part."""
    sessions = traffic(*(at(0.0, prompt(number, 60_000, 2)) for number in range(2)))
    asked, run, found = rolled(fleet(2), sessions, Rollout(at_s=1.0, start_s=100.0, drain_timeout_s=1.0))
    assert_all_ended(asked, run, 2)
    assert (found.cut, found.failed, found.moved) == (0, 0, 0)
    assert run.outcomes[0].pod == run.outcomes[1].pod


def test_a_new_pod_is_cold_and_its_router_knows_that() -> None:
    """A prompt that was cached is computed again on a pod that has been replaced, as predicted."""
    sessions = traffic(*(at(second, prompt(1, 1601)) for second in (0.0, 5.0, 15.0)))
    _, run, _ = rolled(fleet(1), sessions, Rollout(at_s=10.0, start_s=1.0))
    assert [one.cached_tokens for one in run.outcomes] == [0, 1600, 0]
    assert [one.predicted_cached_tokens for one in run.outcomes] == [0, 1600, 0]


@pytest.mark.parametrize("continues", [False, True])
def test_no_request_fails_while_a_pod_is_away(*, continues: bool) -> None:
    """Under mixed traffic to three routers, with an engine's overhead."""
    conditions = Conditions(routers=3, overhead_ms=20.0)
    rollout = Rollout(at_s=5.0, start_s=10.0, continues=continues)
    mixed = small_mix(60.0).traffic()
    asked, run, found = rolled(fleet(3), mixed, rollout, conditions, policy_spec("cost_aware").build())
    assert_all_ended(asked, run, len(run.outcomes))
    assert (found.failed, found.cut) == (0, 0)
    assert 0.5 <= found.minutes < 1.0
    assert 0 < found.ttft_ms[0] <= found.ttft_ms[2]


def test_the_command_prints_both_and_shows_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(per_s=0.5, tokens=500, prompts=(100, 200), pods=2, duration_s=390.0, jobs=1)
    assert ended.value.code == 0
    waited, moved = capsys.readouterr().out.splitlines()
    assert '"continues": false' in waited and '"moved": 0' in waited
    assert '"continues": true' in moved and '"cut": 0' in moved
