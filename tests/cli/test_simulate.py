"""Does `warmroute simulate` run what is typed, show what came out, and say plainly what it cannot do?"""

from __future__ import annotations

import csv
import gc
import sys
from pathlib import Path

import pytest

from router.cli.simulate import simulated_policies
from tests.cli.conftest import Typed


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_one_run_ends_with_one_row(typed: Typed, mix: Path, fleet: Path) -> None:
    """Of the default policy, on the fleet as it is; garbage is collected again afterwards."""
    ended = typed("simulate", mix, "--fleet", fleet)
    assert ended.code == 0, ended.err
    assert "load 1; 2 pods" in ended.out and ended.out.count("cost_aware") == 1
    assert "requests within 1000 ms to the first token and 100 ms a token" in " ".join(ended.out.split())
    assert gc.isenabled()


def test_every_combination_is_a_row_of_the_csv_and_every_policy_is_in_the_report(
    typed: Typed, mix: Path, fleet: Path, tmp_path: Path
) -> None:
    """2 policies, 2 loads, 2 sizes, 2 seeds; the table has means over seeds."""
    table, page = tmp_path / "runs.csv", tmp_path / "page.html"
    asked = ("--policies", "cost_aware, round_robin", "--loads", "1,2", "--pods", "2,3", "--seeds", "2", "--jobs", "2")
    ended = typed("simulate", mix, "--fleet", fleet, *asked, "--csv", table, "--report", page)
    assert ended.code == 0, ended.err
    rows = rows_of(table)
    settings = {(row["policy"], row["load"], row["pods"], row["seed"]) for row in rows}
    assert len(rows) == len(settings) == 16
    assert all(float(row["ttft_mean_ms"]) > 0 and row["cached_share_chat"] for row in rows)
    assert ended.out.count("cost_aware") == ended.out.count("round_robin") == 4
    told = page.read_text()
    assert "mix.yaml on llama-3.1-70b" in told and "cost_aware" in told and "round_robin" in told


def test_the_same_command_gives_the_same_figures(typed: Typed, mix: Path, fleet: Path, tmp_path: Path) -> None:
    """In one process or in two."""
    tables = []
    for jobs in (1, 2):
        path = tmp_path / f"{jobs}.csv"
        typed("simulate", mix, "--fleet", fleet, "--seeds", 2, "--csv", path, "--jobs", jobs)
        tables.append(path.read_text())
    assert tables[0] == tables[1]


def test_compare_runs_all_policies_at_three_loads_with_three_seeds_and_wrong_coefficients(
    typed: Typed, trace: Path, fleet: Path, tmp_path: Path
) -> None:
    """The whole grid: 9 runs of each policy as it is, 4 with what it misjudges."""
    path = tmp_path / "runs.csv"
    ended = typed("simulate", trace, "--fleet", fleet, "--compare", "--requests", 3, "--csv", path)
    assert ended.code == 0, ended.err
    rows, known = rows_of(path), set(simulated_policies())
    assert {row["policy"] for row in rows} == known
    assert {row["load"] for row in rows} == {"0.7", "1.0", "1.3"}
    assert len(rows) == len(known) * (9 + 4)
    assert {row["requests"] for row in rows} == {"3"}


def test_an_azure_trace_runs_too(typed: Typed, fleet: Path, tmp_path: Path) -> None:
    """Or its first lines."""
    path, table = tmp_path / "azure.csv", tmp_path / "runs.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,4\n2023-11-16 18:15:47.6805900,374,4\n2023-11-16 18:15:48.6805900,374,4\n"
    )
    assert typed("simulate", path, "--fleet", fleet, "--requests", 2, "--csv", table).code == 0
    assert [row["requests"] for row in rows_of(table)] == ["2"]


def test_a_policy_that_is_not_there_is_named_with_those_that_are(typed: Typed, mix: Path, fleet: Path) -> None:
    """Exit code 2, before anything runs."""
    ended = typed("simulate", mix, "--fleet", fleet, "--policies", "cost_aware,cheapest")
    assert ended.code == 2
    assert "unknown policy 'cheapest'; known: " in ended.err and "round_robin" in ended.err
    assert ended.out == ""


@pytest.mark.parametrize("policies", ["cost_aware", "cost_aware,round_robin"], ids=["one run", "several"])
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("bad.jsonl", "{}\n", "bad.jsonl:1: no line of a Mooncake trace"),
        ("bad.csv", "when,what\n", "bad.csv:1: no line of an Azure trace"),
        ("bad.yaml", "sessions_per_s: 1\nduration: 1\n", "bad.yaml:2: duration: unknown key"),
        ("bad.txt", "", "bad.txt: unknown kind of traffic"),
    ],
)
def test_traffic_that_cannot_be_read_is_a_message(
    typed: Typed, fleet: Path, tmp_path: Path, name: str, text: str, told: str, policies: str
) -> None:
    """With file and line, from whichever process reads it; exit code 2 and no traceback."""
    path = tmp_path / name
    path.write_text(text)
    ended = typed("simulate", path, "--fleet", fleet, "--policies", policies)
    assert ended.code == 2
    assert told in ended.err and "Traceback" not in ended.err


def test_traffic_that_is_not_there_is_a_message(typed: Typed, fleet: Path, tmp_path: Path) -> None:
    """Exit code 2."""
    ended = typed("simulate", tmp_path / "nowhere.jsonl", "--fleet", fleet)
    assert ended.code == 2 and "does not exist" in ended.err


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ("llama-3.1-70b", "gpt-9", "no prior named 'gpt-9'; known: "),
        ("h100x4", "abacus", "no prior of 'llama-3.1-70b' on 'abacus'; known: "),
    ],
)
def test_a_fleet_of_which_nothing_is_known_is_a_message(
    typed: Typed, mix: Path, fleet: Path, good: str, bad: str, told: str
) -> None:
    """With what is known."""
    fleet.write_text(fleet.read_text().replace(good, bad))
    ended = typed("simulate", mix, "--fleet", fleet)
    assert ended.code == 2 and told in ended.err


@pytest.mark.parametrize(
    ("option", "value"), [("--loads", "0"), ("--loads", "fast"), ("--pods", "-1"), ("--pods", "2.5")]
)
def test_a_number_that_is_none_is_a_message(typed: Typed, mix: Path, fleet: Path, option: str, value: str) -> None:
    """Neither a traceback nor a run without end."""
    ended = typed("simulate", mix, "--fleet", fleet, option, value)
    assert ended.code == 2 and option in ended.err


def test_a_report_without_the_means_to_draw_is_a_message(
    typed: Typed, mix: Path, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing and how to get it; the table and the CSV are there nevertheless."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    table = tmp_path / "runs.csv"
    ended = typed("simulate", mix, "--fleet", fleet, "--csv", table, "--report", tmp_path / "page.html")
    assert ended.code == 2 and "warmroute[report]" in ended.err
    assert "cost_aware" in ended.out and len(rows_of(table)) == 1
