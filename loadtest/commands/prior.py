"""`warmroute prior`: a model's cost prior, a file for config/models, from its `config.json`.

KV bytes follow from the architecture; prefill times are estimates. Nothing is downloaded: a model given by its hub name
must be in the cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest.priors.architecture import Config, KvDtype, KvSize, kv_size, prefill_work
from loadtest.priors.estimate import estimated_row, load_gpus
from router.config.load import shipped
from router.config.models import SpeedPrior, load_priors
from router.errors import ConfigError

MODEL_CONFIG = "config.json"


def prior_command(
    config: Annotated[str, typer.Argument(help="A config.json, its folder, or a hub name that is in the cache.")],
    kv_dtype: Annotated[KvDtype, typer.Option(help="Number format of the KV cache.")] = KvDtype.BF16,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a pod.")] = 1,
    hardware: Annotated[
        list[str] | None, typer.Option(help="A row to add, such as h100x4. Can be repeated.", show_default="h100xTP")
    ] = None,
    name: Annotated[str, typer.Option(help="The prior's name.", show_default="that of the folder, file or hub")] = "",
) -> None:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch, which is not needed
    path = _find_config(config)
    try:
        model = _completed(_read_config(path))
        print(
            "\n".join(_prior_lines(name or _model_name(config, path), model, kv_dtype, tp, hardware or [f"h100x{tp}"]))
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _find_config(config: str) -> Path:
    given = Path(config)
    if given.is_dir():
        return given / MODEL_CONFIG
    if given.is_file() or given.suffix == ".json":
        return given
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(config, MODEL_CONFIG, local_files_only=True)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: not a file or folder, and not in the hub's cache") from error


def _model_name(config: str, path: Path) -> str:
    given = Path(config)
    if given.is_file() and given.name != MODEL_CONFIG:
        return given.stem.lower()
    return (path.resolve().parent.name if given.exists() else given.name).lower()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError("not a JSON object")
    return read


def _completed(read: dict[str, Any]) -> Config:
    """The configuration with its architecture's defaults; unchanged if `transformers` lacks the architecture."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = read.get("model_type")
    if kind not in CONFIG_MAPPING:
        return read
    try:
        known = AutoConfig.for_model(**read).get_text_config()
    except Exception as error:  # transformers has no common exception for invalid values
        raise ConfigError(f"not a valid configuration of {kind!r}: {error}") from error
    aliases = (*known.attribute_map, "layer_types", "num_hidden_layers")
    return {**known.to_dict(), **{name: getattr(known, name) for name in aliases if hasattr(known, name)}}


def _prior_lines(name: str, config: Config, kv_dtype: KvDtype, tp: int, hardware: Sequence[str]) -> Iterator[str]:
    kv, work = kv_size(config, kv_dtype, tp), prefill_work(config)
    gpus = load_gpus()
    fitted = load_priors(shipped("config") / "models").get(name)
    rows = fitted.hardware if fitted else {}
    yield f"# {name}: expected prefill times, used until enough requests were measured."
    yield "#   prefill ms = c0 + c1 (n - p) + c2 (n^2 - p^2)      n prompt tokens, p of them cached"
    yield from _kv_comments(kv, kv_dtype)
    yield f"name: {json.dumps(name)}"
    yield f"kv_bytes_per_token: {kv.bytes_per_token or kv.window_bytes_per_token}"
    yield "hardware:"
    for each in hardware:
        yield from _hardware_row(each, rows.get(each) or estimated_row(work, each, gpus))


def _kv_comments(kv: KvSize, kv_dtype: KvDtype) -> Iterator[str]:
    copies = f"; {kv.copies} equal copies, because tensor parallelism cannot split it further"
    yield f"# KV in {kv_dtype}{copies if kv.copies > 1 else ''}."
    if kv.window_tokens:
        window = kv.window_bytes_per_token * kv.window_tokens
        yield f"# Layers with a window of {kv.window_tokens} tokens keep at most {window} bytes."
        if kv.bytes_per_token:
            all_layers = kv.bytes_per_token + kv.window_bytes_per_token
            yield f"# They are not counted. Engines that treat all layers alike keep {all_layers} bytes per token."
        else:
            yield "# All layers have one: the figure holds for prompts within the window."
    if kv.state_layers:
        yield f"# {kv.state_layers} layers keep a state of fixed size, which is not counted."


def _hardware_row(hardware: str, row: SpeedPrior) -> Iterator[str]:
    yield f"  {hardware}:"
    for key, value in row.model_dump(exclude_defaults=True).items():
        yield f"    {key}: {json.dumps(value) if isinstance(value, str) else format(value, '.4g')}"
