"""Scenario files are validated, and sessions follow them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.fleets.scenario import Arrivals, Bursts, Poisson, Scenario, Steps, load_scenario, ours
from loadtest.traffic.chat_workload import MIX
from router.errors import ConfigError

SMALL = """\
name: small
about: One kind.
duration_s: 4
arrivals: {process: poisson, per_s: 5}
sessions:
  ask: {share: 1, first_words: [5, 9], answer_tokens: [2, 4]}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return str(path)


def small(tmp_path: Path) -> Scenario:
    return load_scenario(written(tmp_path, SMALL))


@pytest.mark.parametrize("name", ours())
def test_each_shipped_scenario_has_sessions_of_every_kind(name: str) -> None:
    """A short run of each shipped file has sessions of each of its kinds."""
    scenario = load_scenario(name)
    assert {session.kind for session in scenario.drawn()} == set(scenario.sessions)


def test_the_mixed_scenario_is_the_demos_mix() -> None:
    """As the file states."""
    scenario = load_scenario("mixed")
    assert {name: kind.shape() for name, kind in scenario.sessions.items()} == dict(MIX)


@pytest.mark.parametrize(
    ("wrong", "line", "complaint"),
    [
        (SMALL.replace("per_s: 5", "per_second: 5"), 4, "per_second: unknown key; did you mean 'per_s'"),
        (SMALL.replace("[5, 9]", "[9, 5]"), 6, "a span is [min, max]"),
        (SMALL.replace("poisson", "sometimes"), 4, "'process' must be one of 'poisson'"),
        (SMALL.replace("share: 1", "share: 0"), 6, "greater than 0"),
        (SMALL.replace("share: 1", "share: 1, shared: {texts: 2, words: [5, 5], picked: 3}"), 6, "3 of 2 texts"),
        (SMALL + "extra: 1\n", 7, "extra: unknown key"),
    ],
)
def test_a_mistake_names_file_line_and_key(tmp_path: Path, wrong: str, line: int, complaint: str) -> None:
    """With the line, and no key is ignored."""
    with pytest.raises(ConfigError) as error:
        load_scenario(written(tmp_path, wrong))
    assert f"small.yaml:{line}: " in str(error.value)
    assert complaint in str(error.value)


def test_another_rate_has_the_same_sessions_at_other_times(tmp_path: Path) -> None:
    """Rates are compared on the same sessions: only their start differs."""
    slow, quick = small(tmp_path).drawn(), small(tmp_path).at(rate_per_s=50).drawn()
    assert len(quick) > 2 * len(slow)
    assert [one.turns for one in slow] == [one.turns for one in quick[: len(slow)]]
    assert [one.start_s for one in slow] != [one.start_s for one in quick[: len(slow)]]


arrivals: st.SearchStrategy[Arrivals] = st.one_of(
    st.builds(Poisson, process=st.just("poisson"), per_s=st.floats(1, 50)),
    st.builds(
        Bursts,
        process=st.just("bursts"),
        per_s=st.floats(1, 50),
        every_s=st.floats(0.5, 5),
        within_s=st.floats(0.01, 6),
    ),
    st.builds(
        Steps,
        process=st.just("steps"),
        per_s=st.floats(1, 50),
        times=st.lists(st.floats(0.1, 3), min_size=1, max_size=4),
    ),
)


@given(arrivals, st.integers(0, 2**32), st.floats(1, 20))
def test_every_arrival_process_gives_sorted_starts_within_the_run(
    process: Arrivals, seed: int, duration_s: float
) -> None:
    """For any arrival process: sorted, and within the run."""
    starts_s = list(process.starts_s(Random(seed), duration_s))
    assert starts_s == sorted(starts_s)
    assert all(0 <= at_s < duration_s for at_s in starts_s)


def test_a_burst_has_all_sessions_of_its_interval() -> None:
    """Eight per second every five seconds: 40 sessions, three times in 15 seconds, each time within 0.1 s."""
    bursts = Bursts(process="bursts", per_s=8, every_s=5)
    starts_s = list(bursts.starts_s(Random(1), 15))
    assert len(starts_s) == 120
    assert all(at_s % 5 < 0.1 for at_s in starts_s)


def test_steps_change_the_rate_in_equal_parts() -> None:
    """A tenfold step has about ten times the arrivals."""
    steps = Steps(process="steps", per_s=10, times=[1, 10])
    starts_s = list(steps.starts_s(Random(1), 60))
    low = sum(at_s < 30 for at_s in starts_s)
    assert abs(low - 300) < 70
    assert abs(len(starts_s) - low - 3000) < 220
