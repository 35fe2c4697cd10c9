"""Is what is said of the policy language what the code does?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helm.policy_pages import file_schema, reference_page
from router.config.load import plain, read_document, shipped
from router.policy.catalog import COSTS, FILTERS, PICKERS

POLICIES = shipped("policies")
FILES = sorted(POLICIES.glob("**/*.yaml"))


def test_every_filter_term_and_picker_is_described_with_its_fields() -> None:
    """By name, with the formula of its docstring."""
    page = reference_page()
    for name, kind in (*FILTERS.items(), *COSTS.items(), *PICKERS.items()):
        assert f"### {name}\n" in page
        assert all(f"| `{field}` |" in page for field in kind.model_fields)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_policy_points_an_editor_to_the_schema(file: Path) -> None:
    """Relative to where it stands."""
    line = next(line for line in file.read_text().splitlines() if "yaml-language-server" in line)
    assert (file.parent / line.partition("$schema=")[2]).resolve() == (POLICIES / "schema.json").resolve()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_schema_has_every_key_of_the_shipped_policies(file: Path) -> None:
    """At the top, and among the filters, costs and pickers."""
    schema, said = file_schema(), plain(read_document(file).data)
    assert said.keys() <= schema["properties"].keys()
    for choice, model in (("filters", "FilterChoices"), ("costs", "CostChoices"), ("picker", "PickerChoice")):
        assert said.get(choice, {}).keys() <= schema["$defs"][model]["properties"].keys()
    json.dumps(schema)
