"""The reference page and the JSON schema of policy files, from the code.

A term's docstring is its purpose and its formula, its fields are the YAML.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.policy.catalog import COSTS, FILTERS, PICKERS
from router.policy.reference import purpose_of, unit_of
from router.policy.spec import PolicySpec
from router.policy.term import CostTerm

CHAPTERS = ("filters", "costs", "picker")

_HEAD = """# Policy file reference

Printed by `warmroute policy docs`. How to choose a policy: [README.md](README.md). An editor with support for YAML
schemas completes and checks these keys if a file begins with `# yaml-language-server: $schema=schema.json`.
"""


_FILTERS = """Filters exclude pods before pricing, in the order below. A filter that would leave no usable pod is
ignored; with `strict: true` it refuses the request (503) instead.
"""


def reference_page() -> str:
    """The reference page, as Markdown."""
    parts = [_HEAD, "## A file\n", _table(PolicySpec), *_sections(PolicySpec)]
    for title, text, members in (
        ("Filters: `filters`", _FILTERS, FILTERS),
        ("Cost terms: `costs`", "The cost of a candidate is the sum of the named terms, in milliseconds.\n", COSTS),
        ("Pickers: `picker`", "A policy has exactly one.\n", PICKERS),
    ):
        parts += [f"## {title}\n", text, *(part for row in members.items() for part in _member(*row))]
    return "\n".join(parts)


def file_schema() -> dict[str, Any]:
    """JSON schema of one file as it is written: with `extends`, all keys but `name` and `about` may be inherited, and
    null removes an inherited one."""
    schema = PolicySpec.model_json_schema()
    schema["required"] = ["name", "about"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": ["picker"]}]
    for name, field in schema["properties"].items():
        if name not in ("name", "about") and "$ref" in field:
            field["anyOf"] = [{"$ref": field.pop("$ref")}, {"type": "null"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_page() -> str:
    """The schema as the text of a file."""
    return json.dumps(file_schema(), indent=1, sort_keys=True) + "\n"


def _member(name: str, kind: type[BaseModel]) -> Iterator[str]:
    yield f"### {name}\n"
    text, purpose = inspect.getdoc(kind) or "", purpose_of(kind)
    if issubclass(kind, CostTerm) and not text.startswith(purpose):
        yield f"{purpose}\n"
    yield f"{text}\n"
    if kind.model_fields:
        yield _table(kind)


def _table(kind: type[BaseModel], above: str = "") -> str:
    """One row per field."""
    rows = ["| key | default | unit | |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if _section_in(field) is None:
            text = " ".join((field.description or "").split())
            key = field.alias or name
            rows.append(f"| `{key}` | {_default(field)} | {unit_of(above + key)} | {text} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{'null' if value is None else json.dumps(value)}`"


def _section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a key's mapping; None for other values."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _sections(kind: type[BaseModel], above: str = "") -> Iterator[str]:
    """The mappings of a file, each with its keys; filters, terms and pickers have their own chapters."""
    for name, field in kind.model_fields.items():
        section = _section_in(field)
        if section is not None and name not in CHAPTERS:
            key = f"{above}{field.alias or name}"
            yield f"### {key}\n"
            yield f"{field.description or inspect.getdoc(section)}\n"
            yield _table(section, f"{key}.")
            yield from _sections(section, f"{key}.")
