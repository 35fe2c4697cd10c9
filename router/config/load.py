"""How does a YAML file become a frozen, checked value, and how does a mistake in it name its line?

Every configuration file of the product (router.yaml, policies, cost priors) is read here. Unknown keys, wrong types
and duplicate keys raise `ConfigError` with file, line, path and, where one is near, the key that was probably meant.
This file never decides what a key means: the pydantic models do.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from router.errors import ConfigError


class Strict(BaseModel):
    """Base of every configuration model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must look like http://host:port")
    if parts.query or parts.fragment or parts.username:
        raise ValueError("must be scheme, host, port and optionally a path prefix, nothing else")
    return value.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url)]
M = TypeVar("M", bound=BaseModel)

KEPT_DOCUMENTS = 64
"""To parse a policy takes two milliseconds, in which nothing else of this process has Python: a reload parses what has
changed."""


@dataclass(frozen=True, slots=True)
class Document:
    """One parsed YAML file that still knows where each of its keys stands."""

    path: Path
    data: Any

    def line_of(self, location: Sequence[str | int]) -> int:
        """1-based line of the deepest part of `location` that the file really has."""
        node, line = self.data, 1
        for key in location:
            # pydantic's location also names the member of a union, which the file does not
            line, node = _position(node, key) or (line, node)
        return line


def read_document(path: Path) -> Document:
    """Parse one YAML file, unless it says what it said before. An empty file is an empty mapping."""
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


@lru_cache(maxsize=KEPT_DOCUMENTS)
def _parsed(path: Path, text: str) -> Document:
    """Nobody changes a document."""
    try:
        data = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    except Exception as error:  # characters that YAML has not, dates that are none, merged scalars: the library trips
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    return Document(path, {} if data is None else data)


def validate(document: Document, model: type[M], data: Any = None) -> M:
    """The document as `model`, or a `ConfigError` that lists every mistake with its line. With `data`, that is read
    instead: the document and what it builds on."""
    try:
        return model.model_validate(plain(document.data) if data is None else data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(document, error, model))) from error


def load(path: Path, model: type[M]) -> M:
    """Read and validate one file."""
    return validate(read_document(path), model)


def _position(node: Any, key: str | int) -> tuple[int, Any] | None:
    try:
        if isinstance(node, dict) and key in node:
            return node.lc.key(key)[0] + 1, node[key]  # type: ignore[attr-defined]
        if isinstance(node, list) and isinstance(key, int) and key < len(node):
            return node.lc.item(key)[0] + 1, node[key]  # type: ignore[attr-defined]
    except (AttributeError, KeyError):
        return None
    return None


def plain(node: Any) -> Any:
    """Builtin containers and scalars: pydantic's error messages then quote plain values."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _explain(document: Document, error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    for problem in error.errors():
        location = problem["loc"]
        dotted = ".".join(str(part) for part in location) or "(top level)"
        where = f"{document.path}:{document.line_of(location)}: {dotted}"
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            yield f"{where}: unknown key{_suggestion(model, location)}"
        else:
            yield f"{where}: {problem['msg']} (got {_shown(problem['input'])})"


def _suggestion(model: type[BaseModel], location: Sequence[str | int]) -> str:
    owner = _model_at(model, location[:-1])
    known = sorted(_fields(owner)) if owner else []
    return nearest(str(location[-1]), known) or (f"; valid keys: {', '.join(known)}" if known else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """What was probably meant, as the end of a message; empty where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _model_at(model: type, location: Sequence[str | int]) -> type | None:
    """The model or dataclass whose fields apply at `location`, looking through lists, dicts and unions."""
    current: type | None = model
    for part in location:
        if current is None:
            return None
        fields = _fields(current)
        if isinstance(part, str) and part in fields:
            current = next(_models_in(fields[part]), None)
    return current


def _fields(model: type) -> Mapping[str, Any]:
    """Annotations by field, as a file names it."""
    if issubclass(model, BaseModel):
        return {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    return {field.name: field.type for field in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else {}


def _models_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
