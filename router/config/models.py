"""What is known of a model before requests: settings by name or pattern, cost priors, and links that KV moves over.

Priors are `config/models/*.yaml`, links `config/hardware/links.yaml`. Calibration replaces the speeds of both.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from router.admission.tenant import Slo
from router.config.load import ENGINE_TOKENIZER, MODEL_FOLDER, Strict, load, shipped
from router.config.mistakes import nearest
from router.config.pod_schema import PodConfig
from router.config.schema import QUEUE_SLO, CostPrior, LinkFigures, LinksConfig, ModelConfig, RouterConfig, WhichLink
from router.errors import ConfigError
from router.types import Link, Links, PodSpeed

MAX_NAME_CHARACTERS = 256
"""A longer name of a model matches no pattern."""
MAX_FOLDER_MODELS = 64
"""Models of one pattern whose tokenizers are loaded from folders."""
MAX_FOLDERS = 10_000
"""Folders that are listed for one pattern."""
MAX_DEPTH = 3
"""Parts of a name: `meta-llama/Llama-3.1-8B` has two."""
_SPECIAL = re.compile(r"[?\[]")
HARDWARE = re.compile(r"(?P<gpu>[a-z0-9]+)x(?P<count>[1-9][0-9]*)")
"""Name of a row, such as h100x4."""


class ModelNames:
    def __init__(self, models: Iterable[ModelConfig]) -> None:
        listed = tuple(models)
        self._by_name = {model.name: model for model in listed if not model.is_pattern}
        self._patterns = [(_regex(model.name), model) for model in listed if model.is_pattern]

    def get(self, name: str) -> ModelConfig | None:
        """The settings of a model, under its own name. If its pattern has folders and none for it, pods tokenize."""
        found = self.entry_of(name)
        if found is None or not found.is_pattern:
            return found
        tokenizer = ENGINE_TOKENIZER if found.has_folders else found.tokenizer
        return found.model_copy(update={"name": name, "tokenizer": tokenizer})

    def entry_of(self, name: str) -> ModelConfig | None:
        if name in self._by_name or len(name) > MAX_NAME_CHARACTERS:
            return self._by_name.get(name)
        return next((model for regex, model in self._patterns if regex.fullmatch(name)), None)


def slo_lookup(config: RouterConfig) -> Callable[[str], Slo | None]:
    """Returns the SLO of a model by its name; None if it has none."""
    names, default = ModelNames(config.models), QUEUE_SLO if config.admission else None
    return lru_cache(1024)(lambda name: (entry.slo if (entry := names.entry_of(name)) else None) or default)


def with_model_folders(config: RouterConfig) -> RouterConfig:
    """The configuration, and a model for each folder that its patterns find. Raises `ConfigError`."""
    names, found = ModelNames(config.models), list(config.models)
    for pattern in config.models:
        if pattern.has_folders:
            tokenizers = {name: place for name, place in _folders(pattern) if names.entry_of(name) is pattern}
            if len(tokenizers) > MAX_FOLDER_MODELS:
                raise ConfigError(
                    f"models: {pattern.name!r} matches more than {MAX_FOLDER_MODELS} folders of {pattern.tokenizer}; "
                    "write a narrower pattern, or list the models that are served"
                )
            found += (
                pattern.model_copy(update={"name": name, "tokenizer": place}) for name, place in tokenizers.items()
            )
    return config.model_copy(update={"models": tuple(found)})


def _regex(pattern: str) -> re.Pattern[str]:
    """`*` alone is special. The expression of `fnmatch` takes linear time."""
    return re.compile(fnmatch.translate(_SPECIAL.sub(r"[\g<0>]", pattern)))


def _folders(pattern: ModelConfig) -> Iterator[tuple[str, str]]:
    """(name, tokenizer) of each folder with a tokenizer. Links that lead out of the folder are not followed."""
    start, _, rest = (pattern.tokenizer or "").partition(MODEL_FOLDER)
    root = Path(start)
    if not root.is_dir():
        raise ConfigError(f"models: the folder {root} of the tokenizers of {pattern.name!r} does not exist; create it")
    inside, waiting, seen = root.resolve(), [root], 0
    while waiting:
        folder = waiting.pop(0)
        seen += 1
        if seen > MAX_FOLDERS:
            raise ConfigError(f"models: {root} has more than {MAX_FOLDERS} folders; name a folder of tokenizers alone")
        if not folder.resolve().is_relative_to(inside):
            continue
        place, name = Path(f"{folder}{rest}"), folder.relative_to(root)
        if folder != root and (place / "tokenizer.json").is_file():
            yield name.as_posix(), str(place)
        elif len(name.parts) < MAX_DEPTH:
            waiting += sorted(Path(one.path) for one in _entries(folder) if one.is_dir() and one.name[0] != ".")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def gpu_count(hardware: str) -> int:
    """The GPUs of a pod on this hardware, such as h100x8 or h100x8-sglang; 1 for other names."""
    named = HARDWARE.fullmatch(hardware.partition("-")[0])
    return int(named["count"]) if named else 1


class SpeedPrior(Strict):
    """One (model, hardware) row: fitted coefficients and their source."""

    c0_ms: float
    c1_ms_per_token: PositiveFloat
    c2_ms_per_token2: NonNegativeFloat
    d0_ms: NonNegativeFloat = 0.0
    d1_ms_per_request: NonNegativeFloat = 0.0
    d2_ms_per_context_token: NonNegativeFloat = 0.0
    launch_ms: NonNegativeFloat = 0.0
    replay_ms: NonNegativeFloat = 0.0
    graph_tokens: NonNegativeInt = 512
    source: str

    def speed(self) -> PodSpeed:
        """The row as a core value. A negative constant is an artefact of the fit and becomes zero."""
        return PodSpeed(**self.model_dump(exclude={"source"}) | {"c0_ms": max(self.c0_ms, 0.0)})


class ModelPrior(Strict):
    """`config/models/NAME.yaml`."""

    name: str
    kv_bytes_per_token: PositiveInt
    hardware: dict[str, SpeedPrior]


def load_priors(folder: Path) -> dict[str, ModelPrior]:
    """All model priors by name. Raises `ConfigError`, also if a file is not named after its model."""
    priors = {}
    for path in sorted(folder.glob("*.yaml")):
        prior = load(path, ModelPrior)
        if prior.name != path.stem:
            raise ConfigError(f"{path}:1: name: {prior.name!r} must equal the file's name")
        priors[prior.name] = prior
    return priors


def all_priors(own_folder: str | None) -> dict[str, ModelPrior]:
    """The shipped priors, overridden by those of the user's folder. Raises `ConfigError`."""
    own = Path(own_folder) if own_folder else None
    if own and not own.is_dir():
        raise ConfigError(f"priors: {own} is not a folder")
    return load_priors(shipped("config") / "models") | (load_priors(own) if own else {})


def prior_speed(priors: Mapping[str, ModelPrior], cost: CostPrior, hardware: str = "") -> PodSpeed:
    """Coefficients of `cost.model` on `hardware`, by default on `cost.hardware`. Raises `ConfigError`."""
    model = _model(priors, cost)
    wanted = hardware or cost.hardware
    row = model.hardware.get(wanted)
    if row is None:
        known = f"{nearest(wanted, model.hardware)}; known: {', '.join(sorted(model.hardware))}"
        raise ConfigError(
            f"hardware: no prior of {cost.model!r} on {'this hardware' if hardware else repr(wanted)}{known}"
        )
    return row.speed()


class PodPriors:
    """The prior of each pod, taken from the configured model that it serves. If that is unknown, from the only
    configured model, or else from the default of `models[].cost`."""

    def __init__(self, models: Iterable[ModelConfig], priors: Mapping[str, ModelPrior]) -> None:
        self._priors = priors
        listed = tuple(models)
        self._names = ModelNames(listed)
        self._costs = [model.cost_row for model in listed]
        (self._other,) = self._costs if len(self._costs) == 1 else (CostPrior(),)

    def of(self, pod: PodConfig, served: Iterable[str]) -> tuple[PodSpeed, int]:
        """(speed, KV bytes per token) of a pod that serves these models. `pod.speed` overrides every row. If the model
        has no row for the pod's hardware, its row for `cost.hardware` is used; raises `ConfigError` if no configured
        model has one."""
        costs = self._costs or [self._other]
        if not pod.speed and not any(self._has_row(cost, pod.hardware) for cost in costs):
            prior_speed(self._priors, costs[0], pod.hardware)
        cost = next((model.cost_row for model in map(self._names.entry_of, served) if model), self._other)
        hardware = pod.hardware if self._has_row(cost, pod.hardware) else ""
        speed = pod.speed or prior_speed(self._priors, cost, hardware)
        return speed, _model(self._priors, cost).kv_bytes_per_token

    def gpus_of(self, hardware: str, served: Iterable[str]) -> int:
        """The GPUs of a pod that serves these models, by its hardware; without one, by that of its model's cost."""
        cost = next((model.cost_row for model in map(self._names.entry_of, served) if model), self._other)
        return gpu_count(hardware or cost.hardware)

    def _has_row(self, cost: CostPrior, hardware: str) -> bool:
        return (hardware or cost.hardware) in _model(self._priors, cost).hardware


def without_cost(models: Iterable[ModelConfig]) -> dict[str, str]:
    """What each model without `cost` starts with, and what to do."""
    row = CostPrior()
    start = f"starts with the speed of {row.model} on {row.hardware}"
    hint = f"{start}; name its own row, or write one with `warmroute prior`"
    return {model.name: hint for model in models if model.cost is None}


def _model(priors: Mapping[str, ModelPrior], cost: CostPrior) -> ModelPrior:
    model = priors.get(cost.model)
    if model is None:
        known = f"{nearest(cost.model, priors)}; known: {', '.join(sorted(priors))}"
        raise ConfigError(f"cost.model: no prior named {cost.model!r}{known}")
    return model


class LinkClass(LinkFigures):
    """A class of links and the source of its figures."""

    source: str


class LinkClasses(Strict):
    """`config/hardware/links.yaml`."""

    classes: dict[str, LinkClass]


def load_link_classes() -> dict[str, LinkClass]:
    return load(shipped("config") / "hardware" / "links.yaml", LinkClasses).classes


def build_links(config: LinksConfig, classes: Mapping[str, LinkClass]) -> Links:
    """A link with its own figures is calibrated under the name of its place. Raises `ConfigError`."""
    return Links(**{place: _link(place, getattr(config, place), classes) for place in LinksConfig.model_fields})


def _link(place: str, which: WhichLink, classes: Mapping[str, LinkClass]) -> Link | None:
    if which is None:
        return None
    if isinstance(which, LinkFigures):
        return which.link(place)
    if which not in classes:
        known = ", ".join(sorted(classes))
        raise ConfigError(f"links.{place}: unknown link class {which!r}{nearest(which, classes)}; known: {known}")
    return classes[which].link(which)
