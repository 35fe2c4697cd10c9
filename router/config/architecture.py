"""How many bytes of KV does a token leave behind, and how much work is its prefill?

Reads a Hugging Face `config.json` that is already parsed, and best completed by `transformers`. What it does not
understand is an error that names the key: a wrong figure would be believed. This file never reads a file and knows no
hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import gcd, inf
from typing import Any, TypeAlias

from router.errors import ConfigError

Config: TypeAlias = Mapping[str, Any]


class KvDtype(StrEnum):
    """Of the numbers in a KV cache."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP32 = "fp32"


_BYTES = {KvDtype.BF16: 2, KvDtype.FP16: 2, KvDtype.FP8: 1, KvDtype.FP32: 4}


class Keeps(Enum):
    """What a layer keeps of the prompt."""

    EVERY_TOKEN = "every token"
    WINDOW = "the last tokens"
    STATE = "a state of fixed size"
    NOTHING = "nothing"


_KEEPS = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "deepseek_sparse_attention"), Keeps.EVERY_TOKEN),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), Keeps.WINDOW),
    **dict.fromkeys(("linear_attention", "mamba", "conv"), Keeps.STATE),
    **dict.fromkeys(("moe", "mlp"), Keeps.NOTHING),
}
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models of several modalities keep the part that has the KV cache."""
_PATTERNS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "full_attention_interval",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "linear_attn_config",
    "sliding_window_pattern",
)
"""Ways to say what each layer is. `transformers` turns those that it knows into `layer_types`."""
_UNEQUAL_LAYERS = (
    "block_configs",
    "global_head_dim",
    "num_kv_shared_layers",
    "per_layer_config",
    "swa_num_key_value_heads",
)
"""Keys by which layers have KV of different sizes."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """What a pod keeps for one sequence, over all ranks and layers."""

    bytes_per_token: int
    """In layers that keep every token."""
    window_bytes_per_token: int
    """In layers that keep only the last `window_tokens`; beyond them nothing grows."""
    window_tokens: int
    state_layers: int
    """Layers whose state does not grow at all, and is not counted."""
    copies: int
    """How often tensor parallelism keeps the same KV; counted in the bytes."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What a prompt token asks of the hardware, over all ranks."""

    active_parameters: int
    """Weights of the layers that each token is multiplied with."""
    attention_flop_per_token2: int
    """Times n^2 - p^2: causal attention over the prompt."""


def text_part(config: Config) -> Config:
    """The language model's own configuration."""
    for name in _NESTED:
        if isinstance(config.get(name), Mapping):
            return text_part(config[name])
    return config


def kv_cache(config: Config, kv_dtype: KvDtype = KvDtype.BF16, tensor_parallel: int = 1) -> KvCache:
    """Grouped, multi-query and multi-head attention `2 kv_heads head_dim` numbers a layer and token, latent attention
    (MLA) `kv_lora_rank + qk_rope_head_dim`. Source: reference/cost-model.md 4.1. Raises `ConfigError`."""
    config = text_part(config)
    layers = _layers(config)
    copies = _copies(config, tensor_parallel)
    of_layer = _numbers_per_token(config) * _BYTES[kv_dtype] * copies
    windowed = layers.count(Keeps.WINDOW)
    full = layers.count(Keeps.EVERY_TOKEN)
    if not full + windowed:
        raise ConfigError("no layer of this architecture keeps KV")
    return KvCache(
        bytes_per_token=full * of_layer + _indexer_bytes_per_token(config, full) * copies,
        window_bytes_per_token=windowed * of_layer,
        window_tokens=_window(config) if windowed else 0,
        state_layers=layers.count(Keeps.STATE),
        copies=copies,
    )


def prefill_work(config: Config) -> PrefillWork:
    """Every layer counted as one of attention and one of (active) experts; windows and states leave c2 alone.
    Raises `ConfigError`."""
    config = text_part(config)
    layers = _layers(config)
    heads = _count(config, "num_attention_heads")
    key_dim, value_dim = _head_dims(config)
    return PrefillWork(
        active_parameters=len(layers) * (_attention_parameters(config) + _expert_parameters(config)),
        attention_flop_per_token2=layers.count(Keeps.EVERY_TOKEN) * heads * (key_dim + value_dim),
    )


# --- layers ---


def _layers(config: Config) -> list[Keeps]:
    _refuse(config, _UNEQUAL_LAYERS)
    named = config.get("layer_types") or config.get("layers_block_type")
    if named:
        return [_keeps(name) for name in named]
    _refuse(config, _PATTERNS)
    count = _count(config, "num_hidden_layers")
    return [Keeps.WINDOW if index >= _first_windowed(config) else Keeps.EVERY_TOKEN for index in range(count)]


def _refuse(config: Config, keys: Sequence[str]) -> None:
    for key in keys:
        if config.get(key):
            raise ConfigError(f"{key}: layers that differ in this way are not understood")


def _keeps(name: str) -> Keeps:
    if name not in _KEEPS:
        raise ConfigError(f"layer_types: {name!r} is not understood; known: {', '.join(_KEEPS)}")
    return _KEEPS[name]


def _first_windowed(config: Config) -> float:
    """Where layers are not named, all from here on have a window."""
    window = config.get("sliding_window")
    if not window or window >= config.get("max_position_embeddings", inf) or config.get("use_sliding_window") is False:
        return inf
    return _count(config, "max_window_layers") if config.get("use_sliding_window") else 0


def _window(config: Config) -> int:
    return _count(config, "sliding_window", "attention_chunk_size")


# --- one layer ---


def _is_latent(config: Config) -> bool:
    return bool(config.get("kv_lora_rank"))


def _numbers_per_token(config: Config) -> int:
    if _is_latent(config):
        return _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")
    return 2 * _kv_heads(config) * _head_dims(config)[0]


def _indexer_bytes_per_token(config: Config, layers: int) -> int:
    """Keys of DeepSeek's sparse attention: one FP8 vector and a 4-byte scale for each 128 of its numbers, whatever the
    KV dtype. Layers may share them (`indexer_types`)."""
    if not config.get("index_head_dim"):
        return 0
    own = config["indexer_types"].count("full") if config.get("indexer_types") else layers
    size = _count(config, "index_head_dim")
    return int(own) * (size + size // 128 * 4)


def _copies(config: Config, tensor_parallel: int) -> int:
    """Ranks share KV heads out; beyond that, and of a latent, each keeps the same."""
    heads = 1 if _is_latent(config) else _kv_heads(config)
    if gcd(heads, tensor_parallel) != min(heads, tensor_parallel):
        raise ConfigError(f"--tp: {tensor_parallel} ranks cannot share {heads} KV heads evenly")
    return max(1, tensor_parallel // heads)


def _kv_heads(config: Config) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _count(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads")


def _head_dims(config: Config) -> tuple[int, int]:
    """Of keys and of values, as attention computes with them."""
    if _is_latent(config):
        return _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim"), _count(config, "v_head_dim")
    size = config.get("head_dim") or _count(config, "hidden_size") // _count(config, "num_attention_heads")
    return size, size


def _attention_parameters(config: Config) -> int:
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    key_dim, value_dim = _head_dims(config)
    if not _is_latent(config):
        return hidden * key_dim * 2 * (heads + _kv_heads(config))
    q_rank, kv_rank = config.get("q_lora_rank"), _count(config, "kv_lora_rank")
    query = q_rank * (hidden + heads * key_dim) if q_rank else hidden * heads * key_dim
    up = kv_rank * heads * (_count(config, "qk_nope_head_dim") + value_dim)
    return int(query) + hidden * _numbers_per_token(config) + up + heads * value_dim * hidden


def _expert_parameters(config: Config) -> int:
    """Gate, up and down of the dense layer, or of the experts that one token goes through."""
    active = config.get("num_experts_per_tok")
    if not active:
        return 3 * _count(config, "hidden_size") * _count(config, "intermediate_size")
    width = _count(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    return 3 * _count(config, "hidden_size") * int(active * width + shared)


def _count(config: Config, *names: str) -> int:
    """The first of these keys that is there."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, int) and value > 0:
                return value
            raise ConfigError(f"{name}: {value!r} is no positive number; nothing else is understood")
    kind = config.get("model_type", "unknown")
    raise ConfigError(f"{' or '.join(names)} is missing, and architecture {kind!r} cannot be sized without it")
