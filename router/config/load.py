"""Reads YAML files into frozen pydantic models.

Unknown keys, wrong types and duplicate keys raise `ConfigError` with file, line, path and a similar valid key, if any.
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

from router.errors import ConfigError


class Strict(BaseModel):
    """Base of all configuration models: frozen; unknown keys are errors."""

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
_PACKAGE = Path(__file__).resolve().parent.parent

CACHED_DOCUMENTS = 64
"""Parsing a policy blocks the process for two milliseconds, so a reload only parses changed files."""


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed YAML file with the lines of its keys."""

    path: Path
    data: Any

    def line_of(self, location: Sequence[str | int]) -> int:
        """1-based line of the deepest part of `location` that exists in the file."""
        node, line = self.data, 1
        for key in location:
            # pydantic's location also contains the names of union members, which are not in the file
            line, node = _position(node, key) or (line, node)
        return line


def shipped(folder: str) -> Path:
    """The `policies` or `config` folder that is shipped: next to `router/` in a checkout, inside it in a wheel."""
    inside = _PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def read_document(path: Path) -> Document:
    """A YAML file, parsed anew if its text changed. An empty file is an empty mapping. Raises `ConfigError`."""
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


@lru_cache(maxsize=CACHED_DOCUMENTS)
def _parsed(path: Path, text: str) -> Document:
    try:
        data = YAML(typ="rt").load(text)
    except Exception as error:  # the library has no common exception, for example for invalid characters and dates
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {problem or error}") from error
    return Document(path, {} if data is None else data)


def validate(document: Document, model: type[M], data: Any = None) -> M:
    """The document as `model`, or `data` in its place. Raises `ConfigError` that lists every mistake with its line."""
    try:
        return model.model_validate(plain(document.data) if data is None else data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(document, error, model))) from error


def load(path: Path, model: type[M]) -> M:
    """One file as `model`. Raises `ConfigError`."""
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
    """The node as builtin containers and scalars, so that pydantic's messages quote plain values."""
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
    """ "; did you mean ...?" with the most similar known word; empty if none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _model_at(model: type, location: Sequence[str | int]) -> type | None:
    """The model or dataclass at `location`, also inside lists, dicts and unions."""
    current: type | None = model
    for part in location:
        if current is None:
            return None
        fields = _fields(current)
        if isinstance(part, str) and part in fields:
            current = next(_models_in(fields[part]), None)
    return current


def _fields(model: type) -> Mapping[str, Any]:
    """Annotations by the name of the field in a file."""
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
