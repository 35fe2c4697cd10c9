"""The options of `warmroute mock-engine`."""

from __future__ import annotations

from loadtest.commands.mock_engine_command import MockEngineOptions, configs
from loadtest.mock_engine.misreadings import MISREADINGS
from tests.kit.command_line import Typed


def test_a_fleet_may_have_both_front_ends_and_break_a_rule() -> None:
    found = list(configs(MockEngineOptions(count=3, rust=1, misreads="developer")))
    assert [one.front_end for one in found] == ["rust", "", ""]
    assert {one.misreads for one in found} == {"developer"}


def test_an_unknown_rule_names_the_known_ones(typed: Typed) -> None:
    ended = typed("mock-engine", "--misreads", "nothing")
    assert ended.code == 2 and all(rule in " ".join(ended.err.replace("│", " ").split()) for rule in MISREADINGS)
