"""Reads the file of names, which says what the model names of clients become.

names:
- name: gpt-4o                                  # an alias
  to: qwen3-32b
- name: qwen3-32b                               # a canary: 5 % of the conversations
  to: {qwen3-32b: 95, qwen3-32b-next: 5}
  rules:                                        # the first that applies counts, else `to`
  - tenants: [acme]
    to: qwen3-32b-next
  - headers: {x-beta: "1"}
    to: qwen3-32b-next
- name: claude-*                                # names that begin so, except models
  to: qwen3-32b
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from router.admission.names import ModelName, NameRule, Names, NamesInUse, Weights, review
from router.config.load import Strict, read_document, validate
from router.config.mistakes import Location, wrong_at
from router.config.schema import HeaderName
from router.config.watched_file import WatchedFile, stamp_of
from router.errors import ConfigError
from router.types import MAX_NAME_CHARACTERS

log = structlog.get_logger()

MAX_NAMES = 1000
"""Each is a label of a metric."""
MAX_TARGETS = 16


def _weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


def _one_counts(weights: Weights) -> Weights:
    if not any(weights.values()):
        raise ValueError("one weight must be above 0")
    return weights


def _model(value: str) -> str:
    if "*" in value:
        raise ValueError("a target is a model, without `*`")
    return value


def _name(value: str) -> str:
    if "*" in value[:-1]:
        raise ValueError("`*` may only be its last character")
    return value


_Text = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
_Model = Annotated[_Text, AfterValidator(_model)]
_Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Targets = Annotated[
    dict[_Model, _Weight],
    Field(min_length=1, max_length=MAX_TARGETS),
    BeforeValidator(_weights),
    AfterValidator(_one_counts),
]


class RuleEntry(Strict):
    """Other targets for some requests."""

    tenants: tuple[str, ...] = ()
    """Requests of one of these tenants; none: of all."""
    headers: dict[HeaderName, str] = Field(default_factory=dict)
    """... that have all of these headers, with these values."""
    to: _Targets

    @model_validator(mode="after")
    def _selects_some(self) -> RuleEntry:
        if not self.tenants and not self.headers:
            raise ValueError("a rule needs `tenants` or `headers`; the `to` of the name is for all other requests")
        return self

    def build(self) -> NameRule:
        headers = tuple((key.encode(), value.encode()) for key, value in self.headers.items())
        return NameRule(self.to, frozenset(self.tenants), headers)


class NameEntry(Strict):
    """One name that clients may ask for."""

    name: Annotated[_Text, AfterValidator(_name)]
    """The name, a label of metrics. With `*` at its end, all names with that beginning that are not models. It may be
    that of a model, which then gets the share that `to` gives it."""
    to: _Targets
    """The model or adapter that it becomes, or several with their weights, relative to each other. A conversation stays
    with its model: by its session, else by tenant and messages up to the first of the user."""
    rules: tuple[RuleEntry, ...] = ()
    """Other targets for some tenants or headers; the first that applies counts."""
    fallbacks: Annotated[tuple[_Model, ...], Field(max_length=MAX_TARGETS)] = ()
    """Models, adapters or `providers` of router.yaml that serve a request that the target cannot: it has no ready pod,
    its context is too short, it has no place in time for the SLO (`admission`), or its pods fail before the first byte.
    The first that can."""

    def places(self, number: int) -> Iterator[tuple[Location, Iterable[str]]]:
        """Where this entry of the file has targets, and these."""
        yield ("names", number, "to"), self.to
        yield ("names", number, "fallbacks"), self.fallbacks
        for at, rule in enumerate(self.rules):
            yield ("names", number, "rules", at, "to"), rule.to


class NameList(Strict):
    """The file of names."""

    version: PositiveInt = 1
    """Version of this format."""
    names: Annotated[tuple[NameEntry, ...], Field(max_length=MAX_NAMES)]
    """All names. Needed, so that a file that lost its content takes no names away; `[]`: none."""

    @model_validator(mode="after")
    def _is_plain(self) -> NameList:
        if self.version != 1:
            raise wrong_at(("version",), "must be 1, the only version that this release reads")
        numbers = {one.name: number for number, one in reversed(list(enumerate(self.names)))}
        aliases = {one.name for one in self.names if one.name not in one.to}
        for number, entry in enumerate(self.names):
            if numbers[entry.name] != number:
                raise wrong_at(("names", number, "name"), f"duplicate of names.{numbers[entry.name]}.name")
            for place, targets in entry.places(number):
                if other := next((target for target in targets if target in aliases and target != entry.name), None):
                    why = f"{other!r} is a name of this file (names.{numbers[other]}); write the models that it becomes"
                    raise wrong_at(place, why)
        return self


ReviewedNames: TypeAlias = tuple[Names, str]
"""The names, and how many of the latest requests they change."""


def watched_names(
    path: Path, in_use: NamesInUse, on_change: Callable[[str], None], providers: Collection[str] = ()
) -> WatchedFile[ReviewedNames]:
    """The file, which is valid now, and whose names are `in_use`; if it becomes wrong, the last valid ones stay.
    `on_change`: called with the review of each change. `providers`: see `read_names`. Raises `ConfigError`."""

    def read() -> ReviewedNames:
        """In a thread: a review takes milliseconds."""
        names = read_names(path, providers)
        return names, review(names, tuple(in_use.recent))

    def use(found: ReviewedNames) -> None:
        in_use.current, reviewed = found
        log.info("names reloaded", names=len(in_use.current.exact) + len(in_use.current.beginnings), review=reviewed)
        on_change(reviewed)

    event = "invalid names; the last valid ones stay current"
    found = WatchedFile(read, lambda: stamp_of(path), event, use)
    in_use.current, _ = found.current()
    return found


def read_names(path: Path, providers: Collection[str] = ()) -> Names:
    """Raises `ConfigError` with file, line and key. `providers`: names that may only be fallbacks."""
    document = read_document(path, is_watched=True)
    entries = validate(document, NameList).names
    for number, entry in enumerate(entries):
        for keys, targets in entry.places(number):
            if keys[-1] != "fallbacks" and (wrong := next((one for one in targets if one in providers), None)):
                key, where = ".".join(map(str, keys)), f"{path}:{document.line_of(keys)}"
                raise ConfigError(f"{where}: {key}: {wrong!r} is a provider, which may only be one of `fallbacks`")
    built = [ModelName(one.name, one.to, tuple(rule.build() for rule in one.rules), one.fallbacks) for one in entries]
    beginnings = [(one.name[:-1], one) for one in built if one.name.endswith("*")]
    return Names(
        {one.name: one for one in built if not one.name.endswith("*")},
        tuple(sorted(beginnings, key=lambda pair: -len(pair[0]))),
        frozenset[str]().union(*(one.all_targets for one in built)),
    )
