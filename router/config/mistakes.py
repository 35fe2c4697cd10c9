"""Explains what is wrong in a configuration, without repeating a value that may be a secret.

Text is not shown where the schema has a secret, its file or a URL, nor above, below or next to that place: a setting
may be indented wrongly. Text with `@` is never shown: it may be a URL with a password.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, Secret, SecretBytes, SecretStr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

UNSHOWN = "values of this type are not shown"
"""Metadata of a type whose invalid values may contain a secret."""
_SECRET = (SecretStr, SecretBytes, Secret)
FILE_SUFFIXES = (".txt", ".key", ".pem", ".crt", ".token", ".secret", ".env", ".json", ".yaml", ".yml")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SCALARS = (str, int, float, bool, type(None))
_MESSAGES = {
    "missing": "is required",
    "bool": "must be true or false",
    "string": "must be text",
    "int": "must be an integer",
    "float": "must be a number",
    "tuple": "must be a list; begin each entry with `- `",
    **dict.fromkeys(("dict", "model", "dataclass"), "must be a mapping of keys to values"),
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",  # pydantic's message contains the value
    "union_tag_not_found": "needs {discriminator}",
}
"""Messages by pydantic's name for the mistake, or by its first word."""
_WITH_UNIT = re.compile(r"[\d.]+\s*[A-Za-z]+")
_DUPLICATE = re.compile(r'found duplicate key "([a-z_]{1,40})"')
_YAML_HINTS = {
    "'\\t'": "a tab; indent with spaces",
    "another document": "a second document; keep one, without a line `---`",
    "special characters": "a control character, which is not allowed",
    "start any token": "text that begins with @, ` or %; quote it",
    "alias counts": "more values than are read; an alias counts as all values that it stands for",
    **dict.fromkeys(("undefined alias", "alphabetic"), "text that begins with * or &; quote it"),
    "escape": "a backslash without a valid escape after it; use single quotes",
    "recursion": "nested too deeply",
    "expected ':'": "a line without `: ` between key and value",
    "mapping values are not allowed": "a colon where no key can be; check the indentation, and quote values with `: `",
    "stream": "a quotation mark or bracket that is not closed",
}
"""What is wrong, by a part of the YAML library's message."""
REMOVED_KEYS = {
    "KubernetesApi.kubeconfig": "run `kubectl proxy` and set `url: http://127.0.0.1:8001`",
    "KubernetesPods.deletion_cost": "remove the key, and from each pod what it wrote: "
    "`kubectl annotate pods -l SELECTOR controller.kubernetes.io/pod-deletion-cost-`",
    "KubernetesPods.service": "write the `selector` of the Service, or name a headless one under `dns`",
    "Receipts.redis_maxlen": "write `file`, and let a log shipper collect the files of several routers",
    "PolicySpec.shadow": "record receipts, and compare policies with `warmroute replay`",
    "PolicySpec.slo": "write `slo: {ttft_ms: ..}` at the model's entry of `models` in router.yaml",
    "AdmissionConfig.slo": "write `slo: {ttft_ms: 2000, tpot_ms: 100, idle_prefills: 3}` at each entry of `models`",
    "FleetSpec.slo": "write it at the model's entry in router.yaml, and add --config router.yaml; or use --slo",
}
"""What to do instead of keys of earlier versions, by the schema's class and their name."""
_NAMES = re.compile(r"'([^']*)'")

Location: TypeAlias = tuple[str | int, ...]


class FromEnvironment(str):
    """A value that contains an environment variable. It is never shown."""

    __slots__ = ()


def wrong_at(location: Location, message: str) -> PydanticCustomError:
    """A mistake that a check of several values found, at one of them."""
    return PydanticCustomError("wrong_at", "{message}", {"message": message, "at": location})


MAX_MISTAKES = 50
"""Each takes up to 50 us to explain."""


def not_one_of(names: Iterable[str]) -> PydanticCustomError:
    """A mistake in a value that must be one of these names."""
    return PydanticCustomError("enum", "must be one of {expected}", {"expected": ", ".join(map(repr, names))})


def explain_mistakes(
    error: ValidationError,
    model: type[BaseModel],
    data: Any,
    where: Callable[[Location], tuple[str, int]],
    *,
    shows_values: bool = True,
) -> str:
    """A line for each of the first mistakes in `data`, in the order of the file. `where`: file and line of a key, or
    `("", 0)`."""
    found = [(_keys(problem, data, model), problem) for problem in error.errors()[:MAX_MISTAKES]]
    deeper = {keys[:end] for keys, _ in found for end in range(len(keys))}
    kept = [each for each in found if each[0] not in deeper or len(each[0]) >= len(each[1]["loc"])]  # not of a union
    kept.sort(key=lambda each: (where(each[0])[1], [str(key) for key in each[0]]))
    return "\n".join(
        _place(*where(keys)) + _explained(model, keys, [problem for _, problem in group], shows_values=shows_values)
        for keys, group in groupby(kept, key=lambda each: each[0])
    )


def _place(file: str, line: int) -> str:
    return f"{file}:{line}: " if line else file and f"{file}: "


def _explained(model: type[BaseModel], keys: Location, problems: Sequence[ErrorDetails], *, shows_values: bool) -> str:
    """The key and what is wrong with it: of a union, what each of its types requires."""
    first, location = problems[0], problems[0]["loc"]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(model, location, keys, first["input"])
    messages = dict.fromkeys(_message(problem) for problem in problems)
    secret = any(_is_near_secret(model, problem["loc"]) for problem in problems)
    dotted = ".".join(map(str, keys)) or "(top level)"
    unset = first["input"] is None and first["type"] == "value_error"
    got = "" if unset or not shows_values else _got(first["input"], secret=secret)
    return f"{dotted}: {', or '.join(messages)}{got}{_similar(problems)}"


def place_in_data(problem: ErrorDetails) -> Location:
    """Where pydantic or `wrong_at` found the problem."""
    return (*problem["loc"], *problem.get("ctx", {}).get("at", ()))


def _keys(problem: ErrorDetails, data: Any, model: type[BaseModel]) -> Location:
    """The keys that are in the file, and a missing one. pydantic's location also has the names of union members."""
    location = place_in_data(problem)
    keys: list[str | int] = []
    for depth, part in enumerate(location):
        owner = _model_at(model, location[:depth])
        inside = _value_at(data, part)
        if inside is not None or (owner and part in _fields(owner)) or (isinstance(data, dict) and part in data):
            data = inside
            keys.append(part)
    return tuple(keys)


def _value_at(data: Any, key: str | int) -> Any:
    if isinstance(data, list | tuple) and isinstance(key, int) and key < len(data):
        return data[key]
    return data.get(key) if isinstance(data, dict) else None


def yaml_mistake(problem: str) -> str:
    """What to do, by the YAML library's message, which may quote a secret."""
    if duplicate := _DUPLICATE.search(problem):
        return f"{duplicate[1]}: duplicate key; remove one"
    hints = (hint for part, hint in _YAML_HINTS.items() if part in problem)
    return next(hints, "a key is no text, or a value does not match its tag, `<<` or the form of a date")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" with the most similar known word; empty if none is similar."""
    by_lower_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[near[0]]!r}?" if near else ""


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
    kind = problem["type"]
    plain = _MESSAGES.get(kind) or _MESSAGES.get(kind.partition("_")[0])
    if plain:
        plain = plain.format(**problem.get("ctx", {}))
        has_unit = isinstance(problem["input"], str) and _WITH_UNIT.fullmatch(problem["input"])
        return f"{plain}, without a unit" if has_unit and plain.endswith(("integer", "number")) else plain
    return problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)


def _got(value: object, *, secret: bool) -> str:
    if value is None:
        return " (the value is empty: write one, or remove the key)"
    if not isinstance(value, _SCALARS):
        return ""
    if isinstance(value, str) and (secret or isinstance(value, FromEnvironment) or "@" in value):
        return f" (got {unshown(value)})"
    text = repr(value)
    return f" (got {text if len(text) <= 60 else f'{text[:57]}...'})"


def is_file_name(text: str) -> bool:
    """Whether it looks like one, and not like a secret."""
    return text.startswith("/") or text.endswith(FILE_SUFFIXES)


def unshown(text: str) -> str:
    """What messages say in place of text that may be a secret."""
    return f"text of {len(text)} characters, not shown because it may contain a secret"


def _is_near_secret(model: type[BaseModel], location: Location) -> bool:
    """Whether the value there may be or contain a secret, or a value next to it or to what it is in."""
    owners = {_model_at(model, location[:depth]) or BaseModel for depth in range(len(location))}
    near = (annotation for owner in owners for annotation in _fields(owner).values())
    return may_hold_secret(_annotation_at(model, location)) or any(map(_is_secret, near))


def _is_secret(annotation: Any) -> bool:
    """Whether a value of this type may be a secret itself."""
    return not any(True for _ in models_in(annotation)) and may_hold_secret(annotation)


def _similar(problems: Iterable[ErrorDetails]) -> str:
    """A suggestion, if one of a few names is expected and the value is similar to one of them."""
    for problem in problems:
        context = problem.get("ctx", {})
        known = _NAMES.findall(str(context.get("expected") or context.get("expected_tags") or ""))
        word = context.get("tag", problem["input"])
        if known and isinstance(word, str) and (near := nearest(word, known)):
            return near
    return ""


def _unknown_key(model: type[BaseModel], location: Location, keys: Location, value: object) -> str:
    """Names the key, unless it may be a piece of a secret."""
    owner, key = _model_at(model, location[:-1]), str(location[-1])
    fields = _fields(owner) if owner else {}
    if owner and (instead := REMOVED_KEYS.get(f"{owner.__name__}.{key}")):
        return f"{'.'.join(map(str, keys))}: was removed; {instead}"
    of_files = [name for name in fields if name.endswith("_file")] if is_file_name(str(value)) else []
    near = nearest(key, of_files or fields)
    if of_files and not near:
        return f"{'.'.join(map(str, keys[:-1]))}: unknown key; a file is named by {' or '.join(of_files)}"
    secret_near = len(location) > 1 and _is_near_secret(model, location)
    named = key if _KEY.fullmatch(key) and (near or not secret_near) else "..."
    known = f"; valid keys: {', '.join(sorted(fields))}" if fields else ""
    return f"{'.'.join(map(str, (*keys[:-1], named)))}: unknown key{near or known}"


def _annotation_at(model: type, location: Sequence[str | int]) -> Any:
    """The type of the deepest part of `location` that is a field, also inside lists, dicts and unions."""
    found: Any = model
    for part in location:
        owner = next(models_in(found), None)
        if owner is not None and part in (fields := _fields(owner)):
            found = fields[str(part)]
    return found


def _model_at(model: type, location: Sequence[str | int]) -> type | None:
    return next(models_in(_annotation_at(model, location)), None)


def _fields(model: type) -> Mapping[str, Any]:
    """Annotations by the name of the field in a file."""
    if issubclass(model, BaseModel):
        return {field.alias or name: field.rebuild_annotation() for name, field in model.model_fields.items()}
    return {field.name: field.type for field in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else {}


def models_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)
