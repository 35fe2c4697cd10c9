"""`warmroute config check` and `warmroute policies`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Typed


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("links: {elsewhere: rdma}", "links.elsewhere: unknown link class 'rdma'; known: "),
        ("models: [{name: m, cost: {model: gpt-2}}]", "cost.model: no prior named 'gpt-2'; known: "),
        ("policy: cheapest", "unknown policy 'cheapest'; known: "),
    ],
)
def test_names_of_other_files_are_checked(typed: Typed, tmp_path: Path, text: str, what: str) -> None:
    """Link classes, cost priors and policies; exit code 2."""
    path = tmp_path / "router.yaml"
    path.write_text(text)
    ended = typed("config", "check", path)
    assert ended.code == 2 and what in ended.err


def test_a_valid_configuration_is_summarized(typed: Typed, tmp_path: Path) -> None:
    """Exit code 0."""
    path = tmp_path / "router.yaml"
    path.write_text("pods: [{url: 'http://a', role: prefill, handoff: nixl}]\nlinks: {elsewhere: rdma_100}\n")
    ended = typed("config", "check", path)
    assert ended.code == 0 and "valid. 0 models, 1 pods, policies cost_aware." in ended.out


def test_the_list_of_policies_shows_which_requests_each_decides(typed: Typed, tmp_path: Path) -> None:
    """A share of matching requests, or all that no other policy matches."""
    canary = "match: {class: [batch, rag], stream: false}\npercent: 5\n"
    for name, text in (("canary", canary), ("plain", ""), ("wide", "match: {}\n")):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nabout: x\nextends: least_load\n{text}")
    rows = [line for line in typed("policies", "--policies", tmp_path).out.splitlines() if "LowestCost" in line]
    assert "5 % of class batch or rag, stream False" in rows[0]
    assert "as default" in rows[1]
    assert "100 % of all" in rows[2]
