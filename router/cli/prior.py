"""What are a model's KV and prefill expected to cost, before anybody has measured them?

    warmroute prior meta-llama/Llama-3.1-8B --hardware h100x1 --hardware a100x1 > config/models/llama-3.1-8b.yaml

Prints a file of config/models from a model's `config.json`: the bytes of KV as its architecture has them, the prefill
as an estimate. This file never goes to the network: a hub name must be in the cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from router.config.architecture import Config, KvCache, KvDtype, kv_cache, prefill_work
from router.config.priors import SpeedPrior, estimated_row, load_gpus, load_priors
from router.config.shipped import shipped
from router.errors import ConfigError

FILE = "config.json"


def prior_command(
    config: Annotated[str, typer.Argument(help="A config.json, its folder, or a hub name that is in the cache.")],
    kv_dtype: Annotated[KvDtype, typer.Option(help="Of the KV cache.")] = KvDtype.BF16,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that share a sequence's KV.")] = 1,
    hardware: Annotated[list[str] | None, typer.Option(help="A row for it, such as h100x4; several times.")] = None,
) -> None:
    """Ready to be written to a file of that name."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its advice to install torch is none for us
    path = _find(config)
    name = _name(config, path)
    try:
        print("\n".join(_lines(name, _completed(_read(path)), kv_dtype, tp, hardware or [f"h100x{tp}"])))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


# --- reading ---


def _find(config: str) -> Path:
    given = Path(config)
    if given.is_dir():
        return given / FILE
    if given.is_file() or given.suffix == ".json":
        return given
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(config, FILE, local_files_only=True)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: neither a file nor a folder nor in the hub's cache") from error


def _name(config: str, path: Path) -> str:
    """After the folder or the model, as files of config/models are named."""
    given = Path(config)
    if given.is_file() and given.name != FILE:
        return given.stem.lower()
    return (path.resolve().parent.name if given.exists() else given.name).lower()


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError("is no JSON object")
    return read


def _completed(read: dict[str, Any]) -> Config:
    """With what the architecture has where the file says nothing, as engines complete it; as it stands where
    `transformers` does not know the architecture."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = read.get("model_type")
    if kind not in CONFIG_MAPPING:
        return read
    try:
        known = AutoConfig.for_model(**read).get_text_config()
    except Exception as error:  # transformers raises whatever the file made it trip over
        raise ConfigError(f"no configuration of {kind!r}: {error}") from error
    aliases = (*known.attribute_map, "layer_types", "num_hidden_layers")
    return {**known.to_dict(), **{name: getattr(known, name) for name in aliases if hasattr(known, name)}}


# --- writing ---


def _lines(name: str, config: Config, kv_dtype: KvDtype, tp: int, hardware: Sequence[str]) -> Iterator[str]:
    cache = kv_cache(config, kv_dtype, tp)
    work = prefill_work(config)
    gpus = load_gpus()
    fitted = load_priors(shipped("config") / "models").get(name)
    rows = fitted.hardware if fitted else {}
    yield f"# {name}: what a prefill is expected to cost, before our own measurements."
    yield "#   prefill ms = c0 + c1 (n - p) + c2 (n^2 - p^2)      n prompt tokens, p of them cached"
    yield from _about_kv(cache, kv_dtype)
    yield f"name: {json.dumps(name)}"
    yield f"kv_bytes_per_token: {cache.bytes_per_token or cache.window_bytes_per_token}"
    yield "hardware:"
    for each in hardware:
        yield from _row(each, rows.get(each) or estimated_row(work, each, gpus))


def _about_kv(cache: KvCache, kv_dtype: KvDtype) -> Iterator[str]:
    copies = f"; {cache.copies} equal copies, because tensor parallelism cannot split it further"
    yield f"# KV in {kv_dtype}{copies if cache.copies > 1 else ''}."
    if cache.window_tokens:
        window = cache.window_bytes_per_token * cache.window_tokens
        yield f"# Layers with a window of {cache.window_tokens} tokens grow to {window} bytes and no further."
        if cache.bytes_per_token:
            alike = cache.bytes_per_token + cache.window_bytes_per_token
            yield f"# They are left out: an engine that treats all layers alike has {alike} bytes a token instead."
        else:
            yield "# There are no others: the figure holds for prompts within the window."
    if cache.state_layers:
        yield f"# {cache.state_layers} layers have a state that does not grow with the prompt and is left out."


def _row(hardware: str, row: SpeedPrior) -> Iterator[str]:
    yield f"  {hardware}:"
    for key, value in row.model_dump(exclude_defaults=True).items():
        yield f"    {key}: {json.dumps(value) if isinstance(value, str) else format(value, '.4g')}"
