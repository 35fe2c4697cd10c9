"""`warmroute simulate` runs the given settings, `warmroute plan` finds the fewest pods; both report errors."""

from __future__ import annotations

import csv
import gc
import json
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from loadtest.commands.simulate import map_in_processes
from router.config.load import shipped
from router.config.policy_files import load_policies
from tests.kit.command_line import Typed


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_single_run_prints_one_row(typed: Typed, mix: Path, fleet: Path) -> None:
    """The row is that of the default policy on the unchanged fleet. Garbage collection is enabled again afterwards."""
    ended = typed("simulate", mix, "--fleet", fleet)
    assert ended.code == 0, ended.err
    assert "load 1; 2 pods" in ended.out and ended.out.count("cost_aware") == 1
    assert "The SLO: 2000 ms to the first token and 100 ms per token" in " ".join(ended.out.split())
    assert gc.isenabled()


def test_every_combination_is_a_row_of_the_csv_and_every_policy_is_in_each_table(
    typed: Typed, mix: Path, fleet: Path, tmp_path: Path
) -> None:
    """2 policies, 2 loads, 2 sizes, 2 seeds; four tables have means over seeds."""
    table = tmp_path / "runs.csv"
    asked = ("--policies", "cost_aware, round_robin", "--loads", "1,2", "--pods", "2,3", "--seeds", "2", "--jobs", "2")
    ended = typed("simulate", mix, "--fleet", fleet, *asked, "--csv", table)
    assert ended.code == 0, ended.err
    rows = rows_of(table)
    settings = {(row["policy"], row["load"], row["pods"], row["seed"]) for row in rows}
    assert len(rows) == len(settings) == 16
    assert all(float(row["ttft_mean_ms"]) > 0 and row["cached_share_chat"] for row in rows)
    lines = ended.out.splitlines()
    assert all(sum(line.strip().startswith(name) for line in lines) == 4 for name in ("cost_aware", "round_robin"))
    assert [line.strip() for line in lines if line.startswith("load ")] == [
        f"load {load}; {pods} pods" for load in (1, 2) for pods in (2, 3)
    ]


def test_the_same_command_gives_the_same_figures(typed: Typed, mix: Path, fleet: Path, tmp_path: Path) -> None:
    """In one process and in two."""
    tables = []
    for jobs in (1, 2):
        path = tmp_path / f"{jobs}.csv"
        typed("simulate", mix, "--fleet", fleet, "--seeds", 2, "--csv", path, "--jobs", jobs)
        tables.append(path.read_text())
    assert tables[0] == tables[1]


def test_compare_runs_all_policies_at_three_loads_with_three_seeds(
    typed: Typed, trace: Path, fleet: Path, tmp_path: Path
) -> None:
    """9 runs of each shipped policy."""
    path = tmp_path / "runs.csv"
    ended = typed("simulate", trace, "--fleet", fleet, "--compare", "--requests", 3, "--csv", path)
    assert ended.code == 0, ended.err
    rows, known = rows_of(path), set(load_policies(shipped("policies")))
    assert {row["policy"] for row in rows} == known
    assert {row["load"] for row in rows} == {"0.7", "1.0", "1.3"}
    assert len(rows) == len(known) * 9
    assert {row["requests"] for row in rows} == {"3"}


def test_chosen_policies_loads_and_seeds_are_compared(typed: Typed, trace: Path, fleet: Path, tmp_path: Path) -> None:
    """Also where they are the defaults without --compare."""
    path = tmp_path / "runs.csv"
    chosen = ("--policies", "cost_aware", "--loads", "1", "--seeds", 1)
    assert typed("simulate", trace, "--fleet", fleet, "--compare", *chosen, "--requests", 3, "--csv", path).code == 0
    rows = rows_of(path)
    assert {(row["policy"], row["load"]) for row in rows} == {("cost_aware", "1.0")} and len(rows) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for a signal")
def test_the_processes_of_a_pool_end_with_their_parent() -> None:
    """Killed, it has no time to stop them: a pipe that they keep open is closed."""
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            os.close(read)
            map_in_processes(forever, [write, write], 2, "runs")
        finally:
            os._exit(1)  # it must not run the tests after this one
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read(2) == b"**"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert select.select([pipe], [], [], 10)[0] and pipe.read() == b""


def forever(pipe: int) -> None:
    os.write(pipe, b"*")
    signal.pause()


def test_agent_sessions_are_simulated(typed: Typed, fleet: Path, tmp_path: Path) -> None:
    """`--requests` takes the first sessions; a load multiplies their number."""
    path, table = tmp_path / "agents.jsonl", tmp_path / "runs.csv"
    first = {"t": 0, "prompt_tokens": 200, "output_tokens": 2}
    more = {"t": 5, "prompt_tokens": 300, "output_tokens": 2, "think_s": 3, "base": 0, "keep_blocks": 3}
    session = {"block_tokens": 64, "tool_tokens": 100, "system_tokens": 50, "requests": [first, more]}
    path.write_text("".join(json.dumps(one) + "\n" for one in (session, session | {"requests": [first]})))
    ended = typed("simulate", path, "--fleet", fleet, "--requests", 1, "--loads", "1,2", "--csv", table)
    assert ended.code == 0, ended.err
    once, twice = (int(row["requests"]) for row in rows_of(table))
    assert 1.5 * once < twice < 3 * once and once % 2 == twice % 2 == 0


def test_values_of_the_fleet_are_set(typed: Typed, mix: Path, fleet: Path, tmp_path: Path) -> None:
    """Faults, groups of pods and the router's errors, without a copy of the file."""
    path = tmp_path / "runs.csv"

    def mean_ms(*changes: str) -> float:
        options = [part for change in changes for part in ("--set", change)]
        assert typed("simulate", mix, "--fleet", fleet, *options, "--csv", path).code == 0
        return float(rows_of(path)[0]["ttft_mean_ms"])

    plain = mean_ms()
    assert mean_ms("pods.0.slowdown=2") > 1.5 * plain
    assert mean_ms("conditions.overhead_ms=500", "conditions.routers=2") > plain + 450
    assert mean_ms("conditions.restarts=[[0, 1, 0.5]]", "believed.compute=1.0") > 0


def test_admission_slo_and_tenants_are_options(typed: Typed, mix: Path, fleet: Path, tmp_path: Path) -> None:
    """The first does what `--set` does. A tenant has its own SLO."""
    path, tenants = tmp_path / "runs.csv", tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: chat, slo: {ttft_ms: 0.1}}]")

    def row(*options: str) -> dict[str, str]:
        ended = typed("simulate", mix, "--fleet", fleet, "--loads", "40", *options, "--csv", path)
        assert ended.code == 0, ended.err
        return rows_of(path)[0]

    plain = row("--slo", "ttft_ms=90, tpot_ms=100", "--admission", "queue")
    assert plain == row("--slo", "ttft_ms=90", "--set", "admission.rule=queue")
    assert int(plain["refused"]) > 0 == int(row()["refused"])
    assert 0 < float(row("--tenants", str(tenants))["slo_share"]) < float(row()["slo_share"])


def test_the_slo_is_that_of_the_fleets_model_in_router_yaml(
    typed: Typed, mix: Path, fleet: Path, tmp_path: Path
) -> None:
    """`--slo` changes a limit of it. Without one in the file, what to do is said."""
    config = tmp_path / "router.yaml"
    models = "{name: a, slo: {ttft_ms: 1}}, {name: b, cost: {model: llama-3.1-70b, hardware: h100x4}%s}"
    config.write_text(f"models: [{models % ', slo: {ttft_ms: 444, tpot_ms: 50}'}]")
    plan = ("plan", mix, "--fleet", fleet, "--against", "", "--dram-tokens", "0", "--target", "0", "--config", config)
    assert "within 444 ms to the first token, 50 ms a token" in typed(*plan).out
    assert "within 555 ms to the first token, 50 ms a token" in typed(*plan, "--slo", "ttft_ms=555").out
    assert "command line: slo.ttft: unknown key; did you mean 'ttft_ms'" in typed(*plan, "--slo", "ttft=5").err
    config.write_text(f"models: [{models % ''}]")
    assert "router.yaml: add `slo` to the model with `cost: {model: llama-3.1-70b}`" in typed(*plan).err


def test_tenants_who_send_nothing_are_reported(typed: Typed, mix: Path, fleet: Path, tmp_path: Path) -> None:
    """Kinds of sessions are their names."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: acme}]")
    ended = typed("simulate", mix, "--fleet", fleet, "--tenants", tenants)
    assert ended.code == 2 and "tenants.yaml: no tenant has the name of a kind of session" in ended.err


def test_a_plan_has_the_same_options_and_prints_the_goodput(typed: Typed, mix: Path, fleet: Path) -> None:
    """About four requests a second."""
    chosen = ("--slo", "ttft_ms=900,tpot_ms=100", "--admission", "queue", "--against", "", "--dram-tokens", "0")
    ended = typed("plan", mix, "--fleet", fleet, *chosen)
    assert ended.code == 0 and "within 900 ms" in ended.out
    assert 2 < float(table_rows(ended.out, "cost_aware")["cost_aware"][4]) < 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("conditions.routers", "conditions.routers: cannot be set: expected KEY=VALUE"),
        ("pods.9.count=1", "pods.9.count=1: cannot be set: list index out of range"),
        ("pods.0.speed=1", "pods.0.speed: unknown key"),
        ("conditions.event_loss=much", "conditions.event_loss"),
        ("link=[", "link=[: cannot be set: "),
    ],
)
def test_a_value_that_cannot_be_set_is_reported(
    typed: Typed, mix: Path, fleet: Path, change: str, message: str
) -> None:
    """Before a run."""
    ended = typed("simulate", mix, "--fleet", fleet, "--set", change)
    assert (ended.code, ended.out) == (2, "") and message in ended.err


def test_an_unknown_policy_is_reported_with_the_known_ones(typed: Typed, mix: Path, fleet: Path) -> None:
    """Exit code 2, before anything runs."""
    ended = typed("simulate", mix, "--fleet", fleet, "--policies", "cost_aware,cheapest")
    assert ended.code == 2
    assert "unknown policy 'cheapest'; known: " in ended.err and "round_robin" in ended.err
    assert ended.out == ""


@pytest.mark.parametrize("policies", ["cost_aware", "cost_aware,round_robin"], ids=["one run", "several"])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.jsonl", "{}\n", "bad.jsonl:1: invalid line of a Mooncake trace"),
        ("bad.jsonl", '{"block_tokens": 64}\n', "bad.jsonl:1: invalid line of agent sessions"),
        ("azure.csv", "", "azure.csv: unknown kind of traffic; use a Mooncake trace"),
        ("bad.yaml", "sessions_per_s: 1\nduration: 1\n", "bad.yaml:2: duration: unknown key"),
        ("bad.txt", "", "bad.txt: unknown kind of traffic"),
    ],
)
def test_invalid_traffic_is_reported(
    typed: Typed, fleet: Path, tmp_path: Path, name: str, text: str, message: str, policies: str
) -> None:
    """With file and line, also from a child process; exit code 2 and no traceback."""
    path = tmp_path / name
    path.write_text(text)
    ended = typed("simulate", path, "--fleet", fleet, "--policies", policies)
    assert ended.code == 2
    assert message in ended.err and "Traceback" not in ended.err


def test_a_missing_traffic_file_is_reported(typed: Typed, fleet: Path, tmp_path: Path) -> None:
    """Exit code 2."""
    ended = typed("simulate", tmp_path / "nowhere.jsonl", "--fleet", fleet)
    assert ended.code == 2 and "nowhere.jsonl: cannot be read" in ended.err


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("llama-3.1-70b", "gpt-9", "no prior named 'gpt-9'; known: "),
        ("h100x4", "abacus", "no prior of 'llama-3.1-70b' on 'abacus'; known: "),
    ],
)
def test_a_fleet_of_an_unknown_model_or_hardware_is_reported(
    typed: Typed, mix: Path, fleet: Path, good: str, bad: str, message: str
) -> None:
    """With the known ones."""
    fleet.write_text(fleet.read_text().replace(good, bad))
    ended = typed("simulate", mix, "--fleet", fleet)
    assert ended.code == 2 and message in ended.err


@pytest.mark.parametrize(
    ("option", "value"), [("--loads", "0"), ("--loads", "fast"), ("--pods", "-1"), ("--pods", "2.5")]
)
def test_an_invalid_number_is_reported(typed: Typed, mix: Path, fleet: Path, option: str, value: str) -> None:
    """Without a traceback."""
    ended = typed("simulate", mix, "--fleet", fleet, option, value)
    assert ended.code == 2 and option in ended.err


def test_a_report_is_refused_with_what_to_do(typed: Typed, mix: Path, fleet: Path, tmp_path: Path) -> None:
    """It was an option of earlier versions. Before a run."""
    table = tmp_path / "runs.csv"
    ended = typed("simulate", mix, "--fleet", fleet, "--csv", table, "--report", tmp_path / "page.html")
    assert ended.code == 2 and "use --csv" in ended.err and "loadtest.studies.simulate_peers" in ended.err
    assert not ended.out and not table.exists()


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "mixed", "--policies", "cost_aware,sglang_cache_aware"),
        ("plan", "mixed", "--against", "sglang_cache_aware"),
    ],
)
def test_the_policy_of_another_router_is_refused_with_what_to_do(typed: Typed, command: tuple[str, ...]) -> None:
    """Earlier versions simulated them."""
    ended = typed(*command)
    assert ended.code == 2 and not ended.out
    assert "unknown policy 'sglang_cache_aware'" in ended.err and "loadtest.studies.simulate_peers" in ended.err


# --- plan ---


@pytest.fixture
def linked(fleet: Path) -> Path:
    """The fleet, with a link between its pods."""
    fleet.write_text(fleet.read_text() + "link: {t0_ms: 0.4, gb_per_s: 12}\n")
    return fleet


def table_rows(out: str, *names: str) -> dict[str, list[str]]:
    """The cells after the name of each row."""
    found = {name: next(line for line in out.splitlines() if line.strip().startswith(name)) for name in names}
    return {name: line.split(name, 1)[1].split() for name, line in found.items()}


def test_every_variant_of_the_fleet_is_a_row_of_the_plan(typed: Typed, mix: Path, linked: Path) -> None:
    """Policies, a DRAM tier and disaggregated prefill, with pods and GPUs."""
    ended = typed("plan", mix, "--fleet", linked, "--against", "round_robin", "--max-pods", "8", "--jobs", "2")
    assert ended.code == 0, ended.err
    assert "95% within 2000 ms to the first token, 100 ms a token" in ended.out
    names = (
        "round_robin",
        "cost_aware ",
        "cost_aware, 3M tokens of DRAM",
        "cost_aware_pd, prefill apart (1 prefill, 1 decode)",
    )
    rows = table_rows(ended.out, *names)
    assert rows["round_robin"][:2] == rows["cost_aware "][:2] == ["1", "4"]
    assert rows[names[-1]][:2] == ["2", "8"]


def test_variants_that_are_impossible_are_left_out_of_the_plan(typed: Typed, mix: Path, fleet: Path) -> None:
    """Without DRAM tokens, without a link and without other policies."""
    ended = typed("plan", mix, "--fleet", fleet, "--against", "", "--dram-tokens", "0")
    assert ended.code == 0, ended.err
    assert ended.out.count("cost_aware") == 1
    assert "DRAM" not in ended.out and "apart" not in ended.out


def test_an_slo_that_no_fleet_meets_is_exit_code_1(typed: Typed, mix: Path, fleet: Path) -> None:
    """The row shows the number of pods that is not enough."""
    short = ("--slo", "ttft_ms=1", "--max-pods", "2")
    ended = typed("plan", mix, "--fleet", fleet, "--against", "", "--dram-tokens", "0", *short)
    assert ended.code == 1
    assert table_rows(ended.out, "cost_aware")["cost_aware"] == [">", "2"]


@pytest.mark.parametrize("option", ["--policy", "--against"])
def test_a_plan_with_an_unknown_policy_is_reported_with_the_known_ones(
    typed: Typed, mix: Path, fleet: Path, option: str
) -> None:
    """Exit code 2, before anything runs."""
    ended = typed("plan", mix, "--fleet", fleet, option, "cheapest")
    assert ended.code == 2
    assert "unknown policy 'cheapest'; known: " in ended.err and ended.out == ""


def test_invalid_traffic_of_a_plan_is_reported(typed: Typed, fleet: Path, tmp_path: Path) -> None:
    """With file and line; exit code 2."""
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    ended = typed("plan", path, "--fleet", fleet, "--max-pods", "1")
    assert ended.code == 2 and "bad.jsonl:1: invalid line of a Mooncake trace" in ended.err


@pytest.mark.parametrize("traffic", ["mixed", "mixed.yaml", "config/traffic/mixed.yaml"])
def test_shipped_traffic_is_found_from_any_folder(
    typed: Typed, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traffic: str
) -> None:
    """By its name, or by its path in a checkout. An unknown policy ends the command after it is read, before a run."""
    monkeypatch.chdir(tmp_path)
    ended = typed("simulate", traffic, "--policies", "nobody")
    assert ended.code == 2 and "unknown policy 'nobody'" in ended.err


def test_a_file_that_cannot_be_written_is_refused_before_a_run(typed: Typed, mix: Path, tmp_path: Path) -> None:
    """The table of runs."""
    for path in (tmp_path, tmp_path / "missing" / "file"):
        ended = typed("simulate", mix, "--csv", path)
        assert (ended.code, ended.out) == (2, "")
        message = "".join(ended.err.replace("│", "").split())
        assert "--csv" in message and f"{path}:cannotbewritten" in message


def test_requests_are_refused_for_a_mix(typed: Typed, mix: Path) -> None:
    """Its duration is in its file."""
    ended = typed("simulate", mix, "--requests", 5)
    assert ended.code == 2 and "--requests is for traces; shorten `duration_s` in a copy of the mix" in ended.err


def test_unknown_traffic_names_what_is_shipped(typed: Typed) -> None:
    """A path in another folder is never replaced by a shipped file."""
    for traffic in ("nobody", "elsewhere/mixed.yaml"):
        ended = typed("simulate", traffic)
        assert ended.code == 2 and "shipped traffic: agents" in ended.err


def test_the_number_of_runs_is_printed_first(typed: Typed, trace: Path, fleet: Path) -> None:
    """For several runs."""
    ended = typed("simulate", trace, "--fleet", fleet, "--seeds", 2, "--jobs", 1)
    assert "2 runs in 1 processes\n" in ended.err


def test_a_plan_fits_into_80_columns(typed: Typed, mix: Path, linked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name and no figure is cut; every column is explained."""
    monkeypatch.setenv("COLUMNS", "80")
    ended = typed("plan", mix, "--fleet", linked, "--max-pods", "4")
    assert "…" not in ended.out and max(map(len, ended.out.splitlines())) <= 80
    text = " ".join(ended.out.split())
    assert all(f"{title}: " in text for title in ("pods", "GPUs", "SLO", "p99 ms", "cached", "computed", "saved"))


def test_a_policy_that_is_nowhere_in_force_can_be_simulated(
    typed: Typed, tmp_path: Path, fleet: Path, mix: Path
) -> None:
    """Compared with another policy."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nabout: x\nextends: least_load\n")
    ended = typed("simulate", mix, "--fleet", fleet, "--jobs", "1", "--policies", f"round_robin,{mine}")
    assert ended.code == 0
    assert "mine" in ended.out and "round_robin" in ended.out
