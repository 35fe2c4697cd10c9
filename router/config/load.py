"""Reads YAML files into frozen pydantic models.

Unknown keys, wrong types and duplicate keys raise `ConfigError` with file, line, path and a similar valid key, if any.

`${NAME}` and `${NAME:-default}` in values, but not in keys, are replaced with environment variables; `$${` is a literal
`${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo
from ruamel.yaml import YAML

from router.addresses import split_url
from router.config.mistakes import (
    FILE_SUFFIXES,
    UNSHOWN,
    FromEnvironment,
    Location,
    explain_mistakes,
    place_in_data,
    unshown,
    yaml_mistake,
)
from router.errors import ConfigError

_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")
FOLDER = "folder"
"""Key of the validation context: the folder of the file that is read."""
ENGINE_TOKENIZER = "engine"
"""The `tokenizer` of a model that the pods tokenize."""
MODEL_FOLDER = "{model}"
"""In the `tokenizer` of a pattern: a folder with the name of the model."""
_IN_FOLDER = re.compile(r"[^{}]*/\{model\}(/[^{}]+)?")
MAX_VALUES = 500_000
"""In a file: aliases of aliases multiply."""
CACHED_DOCUMENTS = 64
"""Parsing a policy blocks the process for two milliseconds, so a reload only parses changed files."""


def with_environment(data: Any, variables: Mapping[str, str]) -> tuple[Any, list[tuple[Location, str]]]:
    """The data with the values of the variables, and what is wrong at which place."""
    mistakes: list[tuple[Location, str]] = []

    def replaced(node: Any, keys: Location) -> Any:
        if isinstance(node, dict):
            return {key: replaced(value, (*keys, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [replaced(value, (*keys, number)) for number, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        messages = {_mistake(found, variables): None for found in _REFERENCE.finditer(node)}
        mistakes.extend((keys, f"{'.'.join(map(str, keys))}: {message}") for message in messages if message)
        return FromEnvironment(_REFERENCE.sub(lambda found: _value(found, variables) or "", node))

    return replaced(data, ()), mistakes


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str | None:
    """What replaces the reference; None if the variable has no value."""
    if found["name"] is None:
        return "${"
    value = variables.get(found["name"])
    return value if value or found["default"] is None else found["default"]


def _mistake(found: re.Match[str], variables: Mapping[str, str]) -> str:
    if found[0] == "${":
        return "`${` must be followed by a name and `}`: write ${NAME} or ${NAME:-default}, or $${ for a literal ${"
    if _value(found, variables) is None:
        return f"environment variable {found['name']} is not set; set it, or write ${{{found['name']}:-default}}"
    return ""


class Strict(BaseModel):
    """Base of all configuration models: frozen; unknown keys are errors; pydantic's messages contain no values."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, hide_input_in_errors=True)


def checked_url(value: str) -> str:
    """The URL of a server, without a slash at its end. Raises `ValueError`."""
    parts = split_url(value)
    if not parts.hostname or parts.scheme not in ("http", "https") or not value.isprintable() or " " in value:
        hint = "" if "://" in value else "; `http://` is missing"
        raise ValueError(f"must look like http://host:port{hint}")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("must be scheme, host, port and optionally a path prefix, without user name and password")
    return value.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(checked_url), UNSHOWN]
"""The URL of a server. A user name or password in it is an error, because URLs are logged."""


def _beside_file(value: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get(FOLDER)
    return str((folder / value).absolute()) if folder and value else value


def _tokenizer(value: str, info: ValidationInfo) -> str:
    resolved = _beside_file(value, info)
    if MODEL_FOLDER in value and not _IN_FOLDER.fullmatch(value):
        raise ValueError(f"{MODEL_FOLDER} must be a folder inside another one, such as /models/{MODEL_FOLDER}")
    is_path = value.startswith(("./", "../")) or MODEL_FOLDER in value
    is_path = is_path or (value != ENGINE_TOKENIZER and os.path.isdir(resolved))  # noqa: PTH112 - also of a name that is too long
    return resolved if is_path else value


FilePath = Annotated[str, AfterValidator(_beside_file)]
"""A file or folder; relative to the folder of the configuration file."""
SecretPath = Annotated[FilePath, UNSHOWN]
"""A file with a secret. By mistake, the secret may be written in its place."""
SecretVariable = Annotated[str, UNSHOWN]
"""An environment variable with a secret. Likewise."""
TokenizerPlace = Annotated[str, AfterValidator(_tokenizer)]
"""A folder, relative to that of the configuration file, or another place of a tokenizer."""
M = TypeVar("M", bound=BaseModel)
_PACKAGE = Path(__file__).resolve().parent.parent


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

    def place_of(self, location: Sequence[str | int]) -> tuple[str, int]:
        return str(self.path), self.line_of(location)


def shipped(folder: str) -> Path:
    """The `policies` or `config` folder that is shipped: next to `router/` in a checkout, inside it in a wheel."""
    inside = _PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def read_named(key: str, path: str) -> bytes:
    """The file that the configuration names under `key`. Raises `ConfigError`, with the name of the file if it exists:
    else it may be a secret in the wrong place."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        is_file = isinstance(error, PermissionError | IsADirectoryError) or path.endswith(FILE_SUFFIXES)
        named = path if is_file else f"a file (its name: {unshown(Path(path).name)})"
        hint = "" if is_file else "; name a file with the value, not the value itself"
        raise ConfigError(f"{key}: cannot read {named}: {getattr(error, 'strerror', error)}{hint}") from None


def read_document(path: Path, *, is_watched: bool = False) -> Document:
    """A YAML file, parsed anew if its text changed. An empty file is an empty mapping. `is_watched`: it is read again
    when it changes, so it may be no pipe, which would hold up its reader for ever. Raises `ConfigError`."""
    if is_watched and path.is_fifo():
        raise ConfigError(f"{path}: is a pipe, which cannot be read again; name a file")
    return _parsed(path, read_text(path))


def read_text(path: Path) -> str:
    """Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: not UTF-8 text") from error


@lru_cache(maxsize=CACHED_DOCUMENTS)
def _parsed(path: Path, text: str) -> Document:
    try:
        data = YAML(typ="rt").load(text)
        plain(data)
    except Exception as error:  # the library has no common exception, for example for invalid characters and dates
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {yaml_mistake(problem or str(error))}") from None
    return Document(path, {} if data is None else data)


def validate(document: Document, model: type[M], data: Any = None) -> M:
    """The document as `model`, or `data` in its place. Raises `ConfigError` that lists every mistake with its line."""
    given = plain(document.data) if data is None else data
    try:
        return model.model_validate(given, context={FOLDER: document.path.parent})
    except ValidationError as error:
        raise ConfigError(explain_mistakes(error, model, given, document.place_of)) from None


def validate_options(model: type[M], data: Any) -> M:
    """A configuration that options of the command line have changed. Raises `ConfigError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain_mistakes(error, model, data, lambda _: ("command line", 0))) from None


def load(path: Path, model: type[M], changes: Sequence[str] = ()) -> M:
    """One file as `model`, with the values of environment variables. Raises `ConfigError`.

    A change `a.0.b=VALUE` replaces or adds a value, in YAML."""
    found, mistakes = load_valid(path, model, changes)
    if mistakes:
        raise ConfigError(mistakes)
    return found


def load_valid(path: Path, model: type[M], changes: Sequence[str] = ()) -> tuple[M, str]:
    """The same without top-level keys with mistakes, and these mistakes. Raises `ConfigError` if nothing is left."""
    document = read_document(path)
    data, unset = with_environment(plain(document.data), os.environ)
    for change in changes:
        _change(data, change)
    lines = [f"{path}:{document.line_of(keys)}: {message}" for keys, message in unset]
    wrong = {keys[0] for keys, _ in unset if keys}
    while True:
        kept = {key: value for key, value in data.items() if key not in wrong} if wrong else data
        try:
            return model.model_validate(kept, context={FOLDER: path.parent}), "\n".join(lines)
        except ValidationError as error:
            lines.append(explain_mistakes(error, model, kept, document.place_of))
            found = {str(where[0]) for where in map(place_in_data, error.errors()) if where}
            if not isinstance(data, dict) or "version" in found or not found & kept.keys():
                raise ConfigError("\n".join(lines)) from None
            wrong |= found


def _change(data: Any, change: str) -> None:
    key, separator, text = change.partition("=")
    try:
        if not separator:
            raise ValueError("expected KEY=VALUE")
        *parents, last = (int(part) if part.isdigit() else part for part in key.split("."))
        for part in parents:
            data = data.setdefault(part, {}) if isinstance(data, dict) else data[part]
        data[last] = plain(YAML(typ="safe").load(text))
    except Exception as error:  # no such place, or any error of the YAML library
        raise ConfigError(f"{change}: cannot be set: {error}") from None


def _position(node: Any, key: str | int) -> tuple[int, Any] | None:
    try:
        if isinstance(node, dict) and key in node:
            return node.lc.key(key)[0] + 1, node[key]  # type: ignore[attr-defined]
        if isinstance(node, list) and isinstance(key, int) and key < len(node):
            return node.lc.item(key)[0] + 1, node[key]  # type: ignore[attr-defined]
    except (AttributeError, KeyError):
        return None
    return None


def plain(node: Any, room: Iterator[None] | None = None) -> Any:
    """The node as builtin containers and scalars, so that pydantic's messages quote plain values. Raises `ValueError`
    for more than `MAX_VALUES`."""
    room = room or repeat(None, MAX_VALUES)
    if next(room, room) is room:
        raise ValueError(f"more than {MAX_VALUES} values; an alias counts as all values that it stands for")
    if isinstance(node, dict):
        return {str(key): plain(value, room) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value, room) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
