"""Computes KV bytes per token and prefill work of a model from its Hugging Face `config.json`.

Takes the parsed file, preferably completed by `transformers`. Raises `ConfigError` with the key for anything that it
does not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import gcd, inf
from typing import Any, TypeAlias

from router.errors import ConfigError

Config: TypeAlias = Mapping[str, Any]


class KvDtype(StrEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP32 = "fp32"


_BYTES = {KvDtype.BF16: 2, KvDtype.FP16: 2, KvDtype.FP8: 1, KvDtype.FP32: 4}


class LayerKind(Enum):
    FULL = "every token"
    WINDOW = "the last tokens"
    STATE = "a state of fixed size"
    NONE = "nothing"


_LAYER_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "deepseek_sparse_attention"), LayerKind.FULL),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), LayerKind.WINDOW),
    **dict.fromkeys(("linear_attention", "mamba", "conv"), LayerKind.STATE),
    **dict.fromkeys(("moe", "mlp"), LayerKind.NONE),
}
_TEXT_CONFIGS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where multimodal models keep the language model's configuration."""
_LAYER_PATTERNS = (
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
"""Other ways to give the kind of each layer. `transformers` converts those that it supports into `layer_types`."""
_UNEQUAL_LAYERS = (
    "block_configs",
    "global_head_dim",
    "num_kv_shared_layers",
    "per_layer_config",
    "swa_num_key_value_heads",
)
"""Keys of models whose layers have KV of different sizes."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """The KV of one sequence on a pod, over all ranks and layers."""

    bytes_per_token: int
    """In layers that keep every token."""
    window_bytes_per_token: int
    """In layers that keep only the last `window_tokens`."""
    window_tokens: int
    state_layers: int
    """Layers with a state of fixed size, which is not counted."""
    copies: int
    """Number of tensor-parallel ranks with the same KV. The byte counts include all copies."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    active_parameters: int
    """Weights that each token is multiplied with."""
    attention_flop_per_token2: int
    """Factor of n^2 - p^2: causal attention over a prompt of n tokens, p of them cached."""


def text_part(config: Config) -> Config:
    """The configuration of the language model."""
    for name in _TEXT_CONFIGS:
        if isinstance(config.get(name), Mapping):
            return text_part(config[name])
    return config


def kv_size(config: Config, kv_dtype: KvDtype = KvDtype.BF16, tensor_parallel: int = 1) -> KvSize:
    """Per layer and token, grouped, multi-query and multi-head attention keep `2 kv_heads head_dim` numbers, latent
    attention (MLA) `kv_lora_rank + qk_rope_head_dim`. Source: docs/cost-model.md#kv-size. Raises `ConfigError`."""
    config = text_part(config)
    layers = _layers(config)
    copies = _copies(config, tensor_parallel)
    layer_bytes = _numbers_per_token(config) * _BYTES[kv_dtype] * copies
    windowed, full = layers.count(LayerKind.WINDOW), layers.count(LayerKind.FULL)
    if not full + windowed:
        raise ConfigError("no layer of this architecture keeps KV")
    return KvSize(
        bytes_per_token=full * layer_bytes + _indexer_bytes_per_token(config, full) * copies,
        window_bytes_per_token=windowed * layer_bytes,
        window_tokens=_count(config, "sliding_window", "attention_chunk_size") if windowed else 0,
        state_layers=layers.count(LayerKind.STATE),
        copies=copies,
    )


def prefill_work(config: Config) -> PrefillWork:
    """The work if each layer has attention and a dense layer or active experts. Only full attention counts towards c2.
    Raises `ConfigError`."""
    config = text_part(config)
    layers = _layers(config)
    key_dim, value_dim = _head_dims(config)
    heads = _count(config, "num_attention_heads")
    return PrefillWork(
        active_parameters=len(layers) * (_attention_parameters(config) + _expert_parameters(config)),
        attention_flop_per_token2=layers.count(LayerKind.FULL) * heads * (key_dim + value_dim),
    )


# --- layers ---


def _layers(config: Config) -> list[LayerKind]:
    _refuse(config, _UNEQUAL_LAYERS)
    if names := config.get("layer_types") or config.get("layers_block_type"):
        unknown = [name for name in names if name not in _LAYER_KINDS]
        if unknown:
            raise ConfigError(f"layer_types: {unknown[0]!r} is not supported; known: {', '.join(_LAYER_KINDS)}")
        return [_LAYER_KINDS[name] for name in names]
    _refuse(config, _LAYER_PATTERNS)
    first = _first_windowed(config)
    count = _count(config, "num_hidden_layers")
    return [LayerKind.WINDOW if index >= first else LayerKind.FULL for index in range(count)]


def _refuse(config: Config, keys: tuple[str, ...]) -> None:
    for key in keys:
        if config.get(key):
            raise ConfigError(f"{key}: layers that differ in this way are not supported")


def _first_windowed(config: Config) -> float:
    """Without layer types, all layers from this one on have a window."""
    window = config.get("sliding_window")
    if not window or window >= config.get("max_position_embeddings", inf) or config.get("use_sliding_window") is False:
        return inf
    return _count(config, "max_window_layers") if config.get("use_sliding_window") else 0


# --- one layer ---


def _is_latent(config: Config) -> bool:
    return bool(config.get("kv_lora_rank"))


def _numbers_per_token(config: Config) -> int:
    if _is_latent(config):
        return _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")
    return 2 * _kv_heads(config) * _head_dims(config)[0]


def _indexer_bytes_per_token(config: Config, layers: int) -> int:
    """The keys of DeepSeek's sparse attention: an FP8 vector and a 4-byte scale per 128 numbers, for every KV dtype.
    Layers can share keys (`indexer_types`)."""
    if not config.get("index_head_dim"):
        return 0
    own = config["indexer_types"].count("full") if config.get("indexer_types") else layers
    size = _count(config, "index_head_dim")
    return int(own) * (size + size // 128 * 4)


def _copies(config: Config, tensor_parallel: int) -> int:
    """Ranks divide the KV heads; excess ranks keep copies. Every rank has a copy of a latent."""
    heads = 1 if _is_latent(config) else _kv_heads(config)
    if gcd(heads, tensor_parallel) != min(heads, tensor_parallel):
        raise ConfigError(f"--tp: {heads} KV heads cannot be divided evenly by {tensor_parallel} ranks")
    return max(1, tensor_parallel // heads)


def _kv_heads(config: Config) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _count(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads")


def _head_dims(config: Config) -> tuple[int, int]:
    """(dimension of keys, dimension of values) in attention."""
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
    """Gate, up and down projections of the dense layer or of the active experts."""
    active = config.get("num_experts_per_tok")
    if not active:
        return 3 * _count(config, "hidden_size") * _count(config, "intermediate_size")
    width = _count(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    return 3 * _count(config, "hidden_size") * int(active * width + shared)


def _count(config: Config, *names: str) -> int:
    """The value of the first of these keys that is present."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, int) and value > 0:
                return value
            raise ConfigError(f"{name}: {value!r} is not a positive integer")
    kind = config.get("model_type", "unknown")
    raise ConfigError(f"{' or '.join(names)}: missing, but needed for architecture {kind!r}")
