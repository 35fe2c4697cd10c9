"""Can one work on policies at the command line?"""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.load import shipped
from tests.kit.command_line import Typed


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(f"name: {name}\nabout: x\n{text}")
    return file


def test_what_is_shipped_is_right(typed: Typed) -> None:
    """Exit code 0, and no word."""
    ended = typed("policy", "lint")
    assert (ended.code, ended.out) == (0, "")


def test_every_mistake_of_a_folder_is_a_line_with_file_and_line(typed: Typed, tmp_path: Path) -> None:
    """Exit code 1; a file that is right is not mentioned."""
    write(tmp_path, "one", "extends: cost_aware\ncosts:\n  queu: {}\n  prefil: {}\n")
    write(tmp_path, "two", "extends: cost_aware\nmatch: {class: chart}\n")
    write(tmp_path, "good", "extends: cost_aware\nmatch: {class: chat}\n")
    ended = typed("policy", "lint", tmp_path)
    lines = [line.removeprefix(f"{tmp_path}/") for line in ended.out.splitlines()]
    assert ended.code == 1
    assert lines[:2] == [
        "one.yaml:5: costs.queu: unknown key; did you mean 'queue'?",
        "one.yaml:6: costs.prefil: unknown key; did you mean 'prefill'?",
    ]
    assert lines[2].startswith("two.yaml:4: match.class: unknown class 'chart'; did you mean 'chat'?")
    assert len(lines) == 3


def test_one_file_can_be_checked_alone(typed: Typed, tmp_path: Path) -> None:
    """Its neighbours' mistakes are not its own."""
    write(tmp_path, "bad", "extends: nothing\n")
    good = write(tmp_path, "good", "extends: cost_aware\n")
    assert typed("policy", "lint", good).code == 0
    assert typed("policy", "lint", tmp_path / "missing.yaml").code == 1


def test_a_policy_is_shown_with_all_that_it_inherits(typed: Typed, tmp_path: Path) -> None:
    """As a file that can be read again, and does not differ."""
    mine = write(tmp_path, "mine", "extends: cost_aware\nshortlist: 8\n")
    shown = typed("policy", "show", mine).out
    assert "shortlist: 8" in shown and "indifference_ms:" in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown.replace("name: mine", "name: again"))
    assert typed("policy", "diff", mine, again).out == ""


def test_differences_are_printed_by_field_with_units(typed: Typed, tmp_path: Path) -> None:
    """Resolved: what both inherit is no difference. Exit code 1, as of diff."""
    mine = write(
        tmp_path,
        "mine",
        "extends: cost_aware\ncosts: {eviction: {reuse: 2}, decode_interference: {}, transfer: null}\nshortlist: 8\n"
        "picker: {lowest_cost: {indifference_ms: 5}}\nmatch: {prompt_tokens: {min: 100}}\n"
        "filters: {max_waiting: {requests: 3}}\n",
    )
    ended = typed("policy", "diff", "cost_aware", mine)
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "costs.transfer: used -> none   (How long does a pull of KV from another pod delay this request?)",
        "costs.eviction.reuse: 0.2 -> 2.0",
        "picker.lowest_cost.indifference_ms: 1.0 ms -> 5.0 ms",
        "shortlist: 12 pods -> 8 pods",
        "match.prompt_tokens.min: none -> 100 tokens",
        "filters.max_waiting: none -> used   "
        "(Keeps the pods with at most `requests` waiting requests in the last scrape.)",
        "filters.max_waiting.strict: none -> False",
        "filters.max_waiting.requests: none -> 3 requests",
        "costs.decode_interference: none -> used   "
        "(How much does this prompt delay the requests that already decode on the pod?)",
        "costs.decode_interference.weight: none -> 0.02",
    ]


def test_a_policy_does_not_differ_from_itself_under_another_name(typed: Typed, tmp_path: Path) -> None:
    """Exit code 0."""
    mine = write(tmp_path, "mine", "extends: cost_aware\n")
    ended = typed("policy", "diff", mine, "cost_aware")
    assert (ended.code, ended.out) == (0, "")


def test_a_missing_name_is_an_error(typed: Typed) -> None:
    """With what was probably meant."""
    ended = typed("policy", "diff", "cost_awre", "least_load")
    assert ended.code == 2 and "did you mean 'cost_aware'?" in ended.err
    assert "file not found" in typed("policy", "diff", "cost_aware", "nowhere.yaml").err


@pytest.mark.parametrize(("options", "file"), [((), "REFERENCE.md"), (("--schema",), "schema.json")])
def test_docs_prints_what_is_committed(typed: Typed, options: tuple[str, ...], file: str) -> None:
    """The page, or the schema."""
    assert typed("policy", "docs", *options).out == (shipped("policies") / file).read_text()


def test_the_list_shows_which_requests_each_policy_decides(typed: Typed, tmp_path: Path) -> None:
    """A share of matching requests, or all that no other policy matches."""
    write(tmp_path, "canary", "extends: least_load\nmatch: {class: [batch, rag], stream: false}\npercent: 5\n")
    write(tmp_path, "plain", "extends: least_load\n")
    write(tmp_path, "wide", "extends: least_load\nmatch: {}\n")
    listed = typed("policy", "list", "--policies", tmp_path).out
    rows = {line.split()[0]: line for line in listed.splitlines() if line.split()}
    assert "5 % of class batch or rag, stream False" in rows["canary"]
    assert "as default" in rows["plain"]
    assert "100 % of all" in rows["wide"]


def test_the_list_fits_80_columns_and_cuts_no_name(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what each policy is for."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = typed("policy", "list").out.splitlines()
    names = {path.stem for path in shipped("policies").glob("*.yaml")}
    assert names <= {line.split()[0] for line in lines if line.split()}
    assert max(map(len, lines)) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    assert "costs" in "".join(lines)
