"""Every mistake that a configuration can have is explained in words of ours, not of a library."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import router.wiring.router  # noqa: F401 - imports all models
from router.config.load import FOLDER, read_document
from router.config.mistakes import explain_mistakes, models_in
from router.config.schema import RouterConfig
from router.errors import ConfigError

NAN, INFINITE = float("nan"), float("inf")
ODD: list[Any] = ["", "a b", "\ud800", "\0", "x" * 5000, "é", "*", "[::1", "1s", "9" * 5000, "fe80::1%eth0", b"x"]
ODD += [-1, 0, 10**30, 1e308, NAN, INFINITE, -INFINITE, True, None, [], {}, [1], ["x"], [[]], [{}], [None], {"a": 1}]
LIBRARY = re.compile(r"[Ii]nput|String|Tuple|Keys should|Unable to|should|valid |instance of|parse|dictionary|Error")
"""Words of pydantic and Python."""
YAML_LIBRARY = re.compile(
    r"unicode string|found|could not|token|scann|pars|construct|invalid literal|base 10|<[a-z]|unhash"
)


def models(root: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    """All models of the configuration."""
    for model in root.__subclasses__():
        if model.__module__.startswith(("router.config.", "router.admission.")) and not inspect.isabstract(model):
            yield model
        yield from models(model)


MODELS = sorted(set(models()), key=lambda model: (model.__module__, model.__qualname__))


SECTIONS = [(key, one) for key, at in RouterConfig.model_fields.items() for one in models_in(at.annotation)]
CASES: list[tuple[type[BaseModel], tuple[str, ...], list[str]]] = [
    (model, (), [field.alias or name for name, field in model.model_fields.items()]) for model in MODELS
]
CASES += [(RouterConfig, (key,), [one.name for one in fields(at)]) for key, at in SECTIONS if is_dataclass(at)]


@pytest.mark.parametrize(("model", "within", "names"), CASES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_no_message_about_a_value_is_a_librarys(
    model: type[BaseModel], within: tuple[str, ...], names: Sequence[str]
) -> None:
    """For each field and each odd value. None is accepted with an error of another kind."""
    for name in names:
        for value in ODD:
            given: Any = {name: value}
            for key in within:
                given = {key: given}
            try:
                model.model_validate(given, context={FOLDER: Path("/nowhere")})
            except ValidationError as error:
                for line in explain_mistakes(error, model, given, lambda _: ("", 0)).splitlines():
                    said = line.partition(" (got ")[0].partition("; valid keys: ")[0]
                    assert not LIBRARY.search(said), line


def test_the_models_are_found() -> None:
    """So that the test above tests something."""
    assert len(CASES) >= 45


@pytest.mark.parametrize(
    "text",
    [
        "policy: \0",
        "policy: *x",
        "models: [*]",
        "policy: 2024-13-45",
        "policy: 'x",
        "policy: [x",
        "policy: a: b",
        "\tpolicy: a",
        "policy: a\n---\npolicy: b",
        "policy: a\npolicy: b",
        "policy: @x",
        "policy: `x`",
        "policy: %x",
        "%YAML 9.9\n---\npolicy: x",
        "policy: |\nx",
        'policy: "\\q"',
        "policy: !!binary x",
        "policy: !!int x",
        "policy: !!timestamp x",
        "<<: [3]",
        "policy: " + "[" * 2000,
        "? {a: {}}\n: b",
    ],
)
def test_no_message_about_the_syntax_is_a_librarys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match="not valid YAML") as caught:
        read_document(path)
    message = str(caught.value).rpartition("not valid YAML: ")[2]
    assert "\n" not in message and not YAML_LIBRARY.search(message), message
