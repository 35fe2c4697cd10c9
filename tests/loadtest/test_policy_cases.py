"""The table of the cases by which the default is judged."""

from __future__ import annotations

from pathlib import Path

from loadtest.studies.policy_cases import (
    BEFORE,
    CONSTANTS,
    FIGURES,
    GROUPS,
    OURS,
    SETTING,
    append,
    experiment_of,
    losses,
    missing,
    overview,
    policies_of,
    read_rows,
    table,
)
from router.policy.costs.effects import EvictionTerm


def row(policy: str, seed: int, mean_ms: float, slo_share: float = 0.9) -> dict[str, str]:
    """A run of a case at load 2 on 16 pods."""
    figures = dict.fromkeys(FIGURES, "1") | {"ttft_mean_ms": str(mean_ms), "slo_share": str(slo_share)}
    return {"case": "chats", "policy": policy, "load": "2.0", "pods": "16", "seed": str(seed)} | figures


def runs(policy: str, *mean_ms: float, slo_share: float = 0.9) -> list[dict[str, str]]:
    return [row(policy, seed, one, slo_share) for seed, one in enumerate(mean_ms)]


def places(rows: list[dict[str, str]]) -> dict[str, str]:
    cells = [line.split("|") for line in table(rows) if line.startswith("| ")]
    return {line[1].strip(): line[2].strip() for line in cells[1:]}


def test_policies_share_a_place_if_the_interval_of_their_difference_reaches_zero() -> None:
    rows = [*runs("a", 800, 900, 1000), *runs("b", 850, 880, 1060), *runs("c", 900, 1000, 1100)]
    assert places(rows) == {"a": "1", "b": "1", "c": "2"}


def test_one_run_has_no_place_and_loses_nothing() -> None:
    rows = [*runs(OURS, 900), *runs("a", 500)]
    assert places(rows) == {OURS: "", "a": ""}
    assert not [*losses(rows)]


def test_a_loss_names_the_measure_and_the_best_policy() -> None:
    rows = [*runs(OURS, 900, 901, 902, slo_share=0.95), *runs("a", 800, 801, 802, slo_share=0.9)]
    assert [*losses(rows)] == ["- chats, 16 pods, load 2: TTFT mean 901 ms, a 801 ms (+12.5%)"]


def test_the_overview_names_the_best_peer_by_each_measure() -> None:
    ours, before = runs(OURS, 900, 901, 902, slo_share=0.95), runs(BEFORE, 990, 1000, 1010)
    peers = runs("a", 950, 951, 952, slo_share=0.9) + runs("b", 970, 971, 972, slo_share=0.92)
    line = [*overview(ours + before + peers)][-1]
    assert line == "| chats | 16 | 2 | 901 | 2 | 1 | 1,000 | a 951 | 1 | a 1 | 95.0% | b 92.0% |"
    assert len([*overview(peers)]) == 2, "only cases that ours has"


def test_a_complete_case_is_not_run_again(tmp_path: Path) -> None:
    (case,) = GROUPS["no-link"]
    rows = [
        {"case": case.name, "policy": policy, "load": str(at), "pods": "16", "seed": "0"}
        for policy in case.policies
        for at in case.loads
    ]
    path = tmp_path / "rows.csv"
    assert len(missing(case, 1, rows[1:])) == 1
    append(path, rows[:5])
    append(path, rows[5:])
    assert {*read_rows(path)[0]} == {"case", *SETTING, *FIGURES}
    assert not missing(case, 1, read_rows(path)) and len(missing(case, 2, rows)) == len(rows)


def test_all_cases_are_valid(tmp_path: Path) -> None:
    """Their fleets and policies exist; recorded traffic is read only when a case is run."""
    known = policies_of(tmp_path)
    cases = [case for group in GROUPS.values() for case in group]
    for case in cases:
        assert {*case.policies} <= {*known}
        assert experiment_of(case, tmp_path, known).fleet.with_pods(case.pods).pod_count == case.pods
    assert len({(case.name, case.pods) for case in cases}) == len(cases) - 1, "only agent_sessions is in two groups"


def test_the_former_default_and_the_constants_do_not_learn(tmp_path: Path) -> None:
    known = policies_of(tmp_path)
    assert "congestion" not in known[BEFORE].cost_names
    constants = [known[f"{OURS}_reuse_{value:g}".replace(".", "_")] for value in CONSTANTS]
    evictions = [dict(policy.costs)["eviction"] for policy in (known[BEFORE], *constants)]
    learnt = [one.learnt for one in evictions if isinstance(one, EvictionTerm)]
    assert learnt == [0.0] * (1 + len(CONSTANTS))
    assert len({policy.version for policy in constants}) == len(CONSTANTS)
