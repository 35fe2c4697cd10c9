"""`warmroute plan` prints the fewest pods of each variant, or that no number is enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Typed


@pytest.fixture
def linked(fleet: Path) -> Path:
    """The fleet, with a link between its pods."""
    fleet.write_text(fleet.read_text() + "link: {t0_ms: 0.4, gb_per_s: 12}\n")
    return fleet


def rows_of(out: str, *names: str) -> dict[str, list[str]]:
    """The cells after the name of each row."""
    found = {name: next(line for line in out.splitlines() if line.strip().startswith(name)) for name in names}
    return {name: line.split(name, 1)[1].split() for name, line in found.items()}


def test_every_variant_of_the_fleet_is_a_row(typed: Typed, mix: Path, linked: Path) -> None:
    """Policies, a DRAM tier and disaggregated prefill, with pods and GPUs."""
    ended = typed("plan", mix, "--fleet", linked, "--against", "round_robin", "--max-pods", "8", "--jobs", "2")
    assert ended.code == 0, ended.err
    assert "95% within 1000 ms to the first token, 100 ms a token" in ended.out
    names = (
        "round_robin",
        "cost_aware ",
        "cost_aware, 3M tokens of DRAM",
        "cost_aware_pd, prefill apart (1 prefill, 1 decode)",
    )
    rows = rows_of(ended.out, *names)
    assert rows["round_robin"][:2] == rows["cost_aware "][:2] == ["1", "4"]
    assert rows[names[-1]][:2] == ["2", "8"]


def test_variants_that_are_impossible_are_left_out(typed: Typed, mix: Path, fleet: Path) -> None:
    """Without DRAM tokens, without a link and without other policies."""
    ended = typed("plan", mix, "--fleet", fleet, "--against", "", "--dram-tokens", "0")
    assert ended.code == 0, ended.err
    assert ended.out.count("cost_aware") == 1
    assert "DRAM" not in ended.out and "apart" not in ended.out


def test_an_slo_that_no_fleet_meets_is_exit_code_1(typed: Typed, mix: Path, fleet: Path) -> None:
    """The row shows the number of pods that is not enough."""
    fleet.write_text(fleet.read_text().replace("ttft_ms: 1000", "ttft_ms: 1"))
    ended = typed("plan", mix, "--fleet", fleet, "--against", "", "--dram-tokens", "0", "--max-pods", "2")
    assert ended.code == 1
    assert rows_of(ended.out, "cost_aware")["cost_aware"] == [">", "2"]


@pytest.mark.parametrize("option", ["--policy", "--against"])
def test_an_unknown_policy_is_reported_with_the_known_ones(typed: Typed, mix: Path, fleet: Path, option: str) -> None:
    """Exit code 2, before anything runs."""
    ended = typed("plan", mix, "--fleet", fleet, option, "cheapest")
    assert ended.code == 2
    assert "unknown policy 'cheapest'; known: " in ended.err and ended.out == ""


def test_invalid_traffic_is_reported(typed: Typed, fleet: Path, tmp_path: Path) -> None:
    """With file and line; exit code 2."""
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    ended = typed("plan", path, "--fleet", fleet, "--max-pods", "1")
    assert ended.code == 2 and "bad.jsonl:1: invalid line of a Mooncake trace" in ended.err
