"""Explains what is wrong in a configuration, without repeating a value that may be a secret.

A value is shown only where the schema has neither a secret nor a URL, also below that place, because a setting may be
indented wrongly. A value with `@` is never shown: it may be a URL with a password.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Secret, SecretBytes, SecretStr, ValidationError
from pydantic_core import ErrorDetails

UNSHOWN = "values of this type are not shown"
"""Metadata of a type whose invalid values may contain a secret."""
_SECRET = (SecretStr, SecretBytes, Secret)
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_QUOTE = re.compile(r"""(['"])(?:.|<[a-z ]+>)\1|(['"])""")
"""Either a quoted character or kind of token, or another quotation mark."""
_SCALARS = (str, int, float, bool, type(None))


def explain_mistakes(error: ValidationError, model: type[BaseModel], where: Iterable[str]) -> Iterator[str]:
    """One line for each mistake; `where` has the place of each."""
    for problem, place in zip(error.errors(), where, strict=False):
        location = problem["loc"]
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            yield f"{place}: {_unknown_key(model, location)}"
        else:
            dotted = ".".join(map(str, location)) or "(top level)"
            yield f"{place}: {dotted}: {_message(problem)}{_got(model, location, problem['input'])}"


def without_content(problem: str) -> str:
    """The YAML library's message up to the first text that it quotes from the file."""
    quotes = (match.start() for match in _QUOTE.finditer(problem) if match[2])
    return problem[: next(quotes, None)].rstrip(" :") or "a value does not match its tag"


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" with the most similar known word; empty if none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def may_hold_secret(annotation: Any, within: frozenset[type] = frozenset()) -> bool:
    """Whether values of this type may be or contain a secret."""
    if isinstance(annotation, str):
        return annotation == UNSHOWN
    if not isinstance(annotation, type):
        return any(may_hold_secret(inner, within) for inner in get_args(annotation))
    if issubclass(annotation, BaseModel) and annotation not in within:
        types = (field.rebuild_annotation() for field in annotation.model_fields.values())
        return any(may_hold_secret(each, within | {annotation}) for each in types)
    return issubclass(annotation, _SECRET)


def _message(problem: ErrorDetails) -> str:
    if problem["type"] == "union_tag_invalid":  # its message contains the value
        return "{discriminator} must be one of {expected_tags}".format(**problem["ctx"])
    return problem["msg"]


def _got(model: type[BaseModel], location: Sequence[str | int], value: object) -> str:
    if not isinstance(value, _SCALARS):
        return ""
    if may_hold_secret(_annotation_at(model, location)) or "@" in str(value):
        return " (the value is not shown, because it may contain a secret)"
    text = repr(value)
    return f" (got {text if len(text) <= 60 else f'{text[:57]}...'})"


def _unknown_key(model: type[BaseModel], location: Sequence[str | int]) -> str:
    """Names the key, unless it may be a piece of a secret."""
    owner, key = _model_at(model, location[:-1]), str(location[-1])
    fields = _fields(owner) if owner else {}
    near = nearest(key, fields)
    secret_near = any(each in _SECRET for annotation in fields.values() for each in (annotation, *get_args(annotation)))
    named = key if _KEY.fullmatch(key) and (near or not secret_near) else "..."
    known = f"; valid keys: {', '.join(sorted(fields))}" if fields else ""
    return f"{'.'.join(map(str, (*location[:-1], named)))}: unknown key{near or known}"


def _annotation_at(model: type[BaseModel], location: Sequence[str | int]) -> Any:
    """The type of the deepest part of `location` that is a field of `model`."""
    owner: type | None = model
    found: Any = model
    for part in location:
        if owner is not None and issubclass(owner, BaseModel) and part in owner.model_fields:
            found = owner.model_fields[str(part)].rebuild_annotation()
            owner = next(_models_in(found), None)
    return found


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
