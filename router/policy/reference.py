"""What can a policy file say? The reference page and the JSON schema, both made from the code.

A term's module docstring is the question it answers, its class docstring the formula, its fields the YAML. This file
never describes anything itself, so that it cannot be out of date.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.policy.catalog import COSTS, FILTERS, PICKERS
from router.policy.spec import PolicySpec
from router.policy.term import CostTerm, Filter

UNITS = {
    "ms": "ms", "s": "s", "tokens": "tokens", "blocks": "blocks", "bytes": "bytes", "percent": "%",
    "shortlist": "pods", "attempts": "candidates", "layers": "layers", "requests": "requests",
}  # fmt: skip
"""By the end of a field's name."""
CHAPTERS = ("filters", "costs", "picker")

_HEAD = """# What a policy file can say

Made from the code by `warmroute policy docs`; a test holds that it is current. How to choose: [README.md](README.md).
An editor that knows YAML schemas completes and checks these keys when a file begins with
`# yaml-language-server: $schema=schema.json`.
"""


_FILTERS = """Those that are named leave pods out before anything is priced, one after another in the order below.
One that would leave nobody who can serve leaves nobody out; with `strict: true` it refuses the request (503) instead.
"""


def unit_of(key: str) -> str:
    """In what a field counts, by its name, or that of the mapping that it is in; "" for plain numbers and words."""
    above, _, field = key.rpartition(".")
    return UNITS.get(field.rpartition("_")[2]) or (unit_of(above) if above else "")


def question_of(kind: type[BaseModel]) -> str:
    """What a term or picker is there to answer."""
    return (inspect.getdoc(sys.modules[kind.__module__]) or "").partition("\n")[0]


def reference_page() -> str:
    """All of it, as Markdown."""
    parts = [_HEAD, "## A file\n", _table(PolicySpec), *_sections(PolicySpec)]
    parts += ["## Filters: `filters`\n", _FILTERS]
    parts += [part for name, kind in FILTERS.items() for part in _member(name, kind)]
    parts += ["## Cost terms: `costs`\n", "All that are named are added up; each is in milliseconds.\n"]
    parts += [part for name, kind in COSTS.items() for part in _member(name, kind)]
    parts += ["## Pickers: `picker`\n", "Exactly one is named.\n"]
    parts += [part for name, kind in PICKERS.items() for part in _member(name, kind)]
    return "\n".join(parts)


def file_schema() -> dict[str, Any]:
    """JSON schema of one file as it is written: with `extends`, everything else but its name may come from there, and
    null takes away what comes from there."""
    schema = PolicySpec.model_json_schema()
    schema["required"] = ["name", "about"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": ["picker"]}]
    for name, field in schema["properties"].items():
        if name not in ("name", "about") and "$ref" in field:
            field["anyOf"] = [{"$ref": field.pop("$ref")}, {"type": "null"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_page() -> str:
    """The schema as a file."""
    return json.dumps(file_schema(), indent=1, sort_keys=True) + "\n"


def _member(name: str, kind: type[BaseModel]) -> Iterator[str]:
    yield f"### {name}\n"
    if issubclass(kind, CostTerm | Filter):
        yield f"{question_of(kind)}\n"
    yield f"{inspect.getdoc(kind)}\n"
    if kind.model_fields:
        yield _table(kind)


def _table(kind: type[BaseModel], above: str = "") -> str:
    """A row a field."""
    rows = ["| key | default | unit | |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if _section_in(field) is None:
            said = " ".join((field.description or "").split())
            key = field.alias or name
            rows.append(f"| `{key}` | {_default(field)} | {unit_of(above + key)} | {said} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    return f"`{'null' if value is None else json.dumps(value)}`"


def _section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The mapping that stands behind a key, if one does."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _sections(kind: type[BaseModel], above: str = "") -> Iterator[str]:
    """The mappings in a file, each with its keys; terms and pickers have chapters of their own."""
    for name, field in kind.model_fields.items():
        section = _section_in(field)
        if section is not None and name not in CHAPTERS:
            key = f"{above}{field.alias or name}"
            yield f"### {key}\n"
            yield f"{field.description or inspect.getdoc(section)}\n"
            yield _table(section, f"{key}.")
            yield from _sections(section, f"{key}.")
