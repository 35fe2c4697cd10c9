"""Configuration keys and files that the documentation names exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from router.config.schema import RouterConfig
from tests.style.test_plain_english import current

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "router").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "policies").glob("README.md")),
]
SECTIONS = "|".join(
    ["feeds", *(name for name in RouterConfig.model_fields if name not in {"models", "pods", "policy", "priors"})]
)
FILES = {".py", ".jsonl", ".yaml"}
NAME_IN_FILE = re.compile(r"`(?:(\w+)\.)?(\w+)(?:\(\))?`\s\(`([a-z_/]+\.py)`")
FILE = re.compile(r"`([a-z_/]+\.(?:py|md|yaml))`")
OF_READERS = ("policies/x.yaml", "router.yaml")
ENGINES = ("vllm/", "sglang/", "tensorrt_llm/")
"""Files of the engines' own packages."""
KEY = re.compile(rf"`((?:{SECTIONS})(?:\.\w+)+)`")


@cache
def configuration() -> dict[str, Any]:
    """The JSON schema."""
    return RouterConfig.model_json_schema()


def exists(path: str) -> bool:
    """Whether the dotted key leads to a field."""
    section, _, rest = path.partition(".")
    value = configuration()
    schema = value["properties"].get(section, {})
    for name in [part for part in rest.split(".") if part]:
        references = [one["$ref"] for one in [schema, *schema.get("anyOf", [])] if "$ref" in one]
        candidates = [value["$defs"][reference.rsplit("/", 1)[1]].get("properties", {}) for reference in references]
        schema = next((fields[name] for fields in candidates if name in fields), None)
        if schema is None:
            return False
    return bool(schema)


def test_every_documented_configuration_key_exists() -> None:
    named = {(path.name, key) for path in DOCUMENTS for key in KEY.findall(current(path))}
    assert len(named) > 10
    assert not {(file, key) for file, key in named if not exists(key) and Path(key).suffix not in FILES}


def test_every_documented_file_exists() -> None:
    """Paths are relative to `router/`, to the README's folder, or to the repository."""
    pages = [*sorted((ROOT / "router").rglob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
    named = {
        (page, path)
        for page in pages
        for path in FILE.findall(page.read_text())
        if not path.endswith("/x.py") and path not in OF_READERS and not path.startswith(ENGINES)
    }
    assert len(named) > 30
    folders = {page: (ROOT / "router", page.parent, ROOT) for page, _ in named}
    assert not {(page.name, path) for page, path in named if not any((one / path).exists() for one in folders[page])}


def test_unknown_keys_are_noticed() -> None:
    assert exists("limits.retries")
    assert not exists("limits.patience_s")
    assert not exists("feeds.health_interval_s")


def test_a_class_or_function_is_in_the_file_that_is_named_with_it() -> None:
    """As in "`Core.serve` (`request/life.py`)"."""
    pages = [*sorted((ROOT / "router").rglob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    named = {(page.name, *found) for page in pages for found in NAME_IN_FILE.findall(page.read_text())}
    assert len(named) > 30
    assert not {one for one in named if not all(is_defined(name, one[-1]) for name in one[1:3] if name)}


def is_defined(name: str, path: str) -> bool:
    """Whether a file of the router has a class, function, field or constant of this name."""
    found = [one.read_text() for one in (ROOT / "router" / path, ROOT / path) if one.exists()]
    return not found or bool(re.search(rf"^\s*(?:(?:async )?def |class )?{name}\b *[:=(]", found[0], re.MULTILINE))
