"""Finds the settings of a model by its name: those under its own name, else those of the first pattern that matches.

A `*` in a name stands for any characters, also none. Pods choose the names of their models, so these never become
paths: the folders of a pattern with `{model}` are listed once, at the start.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from router.admission.tenant import Slo
from router.config.load import ENGINE_TOKENIZER, MODEL_FOLDER
from router.config.schema import QUEUE_SLO, ModelConfig, RouterConfig
from router.errors import ConfigError

MAX_NAME_CHARACTERS = 256
"""A longer name of a model matches no pattern."""
MAX_FOLDER_MODELS = 64
"""Models of one pattern whose tokenizers are loaded from folders."""
MAX_FOLDERS = 10_000
"""Folders that are listed for one pattern."""
MAX_DEPTH = 3
"""Parts of a name: `meta-llama/Llama-3.1-8B` has two."""
_SPECIAL = re.compile(r"[?\[]")


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
