"""The schema and the table of values follow from `values.yaml`, and the schema is strict at every level."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from helm.generate import descriptions, of_value, values_schema
from tests.helm.charts import CHART

FREE = {
    "config.models[].chat_template_kwargs",
    "engines.pools[].kvTransferConfig",
    "extraObjects[]",
    "global",
    "monitoring.podMonitor.metricRelabelings[]",
    "policies.*",
}
"""Objects whose keys belong to others: an engine, Helm, Prometheus, or the router, which checks policies itself."""


def objects(schema: Any, definitions: Any, path: str, seen: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Path and schema of every object in the values."""
    reference = schema.get("$ref", "").rpartition("/")[2]
    if reference:
        if reference not in seen:
            yield from objects(definitions[reference], definitions, path, seen | {reference})
        return
    for one in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        yield from objects(one, definitions, path, seen)
    if "object" in schema.get("type", []):
        yield path, schema
        for key, one in schema.get("properties", {}).items():
            yield from objects(one, definitions, f"{path}.{key}".lstrip("."), seen)
        if isinstance(schema.get("additionalProperties"), dict):
            yield from objects(schema["additionalProperties"], definitions, f"{path}.*", seen)
    if "items" in schema:
        yield from objects(schema["items"], definitions, f"{path}[]", seen)


def test_unknown_keys_are_refused_at_every_level() -> None:
    schema = values_schema()
    found = dict(objects(schema, schema["definitions"], ""))
    assert len(found) > 200
    opened = {path for path, one in found.items() if one.get("additionalProperties", True) is True}
    assert {path for path in opened if not path.endswith("fieldsV1")} == FREE


def test_every_value_has_a_description() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def missing(path: str, one: Any) -> Iterator[str]:
        for key, value in one.get("properties", {}).items():
            if not value.get("description"):
                yield f"{path}.{key}"
            yield from missing(f"{path}.{key}", value)
        if "properties" in one.get("items", {}):
            yield from missing(f"{path}[]", one["items"])

    assert not list(missing("", schema))


def test_a_value_without_a_comment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image\.tag has no comment above it"):
        of_value("image.tag", "", {"image.repository": "Registry and name."})


def test_comments_describe_the_next_key_and_examples_do_not() -> None:
    text = "# The one.\n# More of it.\n#   example: 1\na:\n  # Inner.\n  b: 1\nc: 2\n"
    assert descriptions(text) == {"a": "The one. More of it.", "a.b": "Inner."}


def test_the_defaults_are_valid_and_complete() -> None:
    schema = values_schema()
    values = YAML(typ="safe").load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(values) == set(schema["properties"]) - {"global"}
