"""KV sizes equal those of engines; unsupported architectures are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.priors.architecture import KvDtype, kv_size, prefill_work
from router.errors import ConfigError
from tests.config.architectures import ARCHITECTURES, DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B

WINDOWED = {**LLAMA_8B, "sliding_window": 4096}
QWEN2 = {**LLAMA_8B, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 28}
QWEN3_NEXT = {
    **LLAMA_8B,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
}
SPARSE = {
    **DEEPSEEK_V3,
    "layer_types": ["deepseek_sparse_attention"] * 61,
    "index_head_dim": 128,
}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("model", "kv_bytes"),
    [
        ("llama-3.1-8b", 131_072),
        ("qwen3-32b", 262_144),
        ("llama-3.1-70b", 327_680),
        ("qwen3-30b-a3b", 98_304),
        ("qwen3-235b-fp8", 192_512),
        ("deepseek-v3", 70_272),
        ("gpt-oss-120b", 36_864),  # the table's 73,728 counts the window layers in full
    ],
)
def test_kv_sizes_equal_those_of_the_cost_model(model: str, kv_bytes: int) -> None:
    """For every model of its table."""
    assert kv_size(ARCHITECTURES[model]).bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        (without(LLAMA_8B, "num_key_value_heads"), 524_288),
        ({**LLAMA_8B, "num_key_value_heads": 1}, 16_384),
        ({**LLAMA_8B, "multi_query": True, "num_kv_heads": 32}, 16_384),
        ({**without(LLAMA_8B, "num_key_value_heads"), "num_kv_heads": 16}, 262_144),
        ({**LLAMA_8B, "multi_query": True, "new_decoder_architecture": True}, 131_072),
        ({**LLAMA_8B, "head_dim": 64}, 65_536),
        ({**LLAMA_8B, "head_dim": None}, 131_072),
        ({"model_type": "llava", "text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 3}}, 131_072),
        ({"thinker_config": {"text_config": LLAMA_8B}}, 131_072),
        (SPARSE, 70_272 + 61 * 132),
        ({**SPARSE, "indexer_types": ["full"] * 10 + ["shared"] * 51}, 70_272 + 10 * 132),
        ({**LLAMA_8B, "layers_block_type": ["mamba", "attention", "hybrid", "mlp"]}, 8_192),
    ],
)
def test_every_notation_of_kv_heads_is_supported(config: dict[str, Any], kv_bytes: int) -> None:
    """Multi-head, grouped-query, multi-query and latent attention; a nested configuration."""
    assert kv_size(config).bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("config", "of_full", "of_window", "window"),
    [
        (GPT_OSS_120B, 36_864, 36_864, 128),
        (WINDOWED, 0, 131_072, 4096),
        (QWEN2, 114_688, 16_384, 100),
        ({**QWEN2, "use_sliding_window": False}, 131_072, 0, 0),
        ({**WINDOWED, "max_position_embeddings": 4096}, 131_072, 0, 0),
        ({**WINDOWED, "max_position_embeddings": 4097}, 0, 131_072, 4096),
        (
            {**LLAMA_8B, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8192},
            4_096,
            4_096,
            8192,
        ),
    ],
)
def test_layers_with_a_window_are_counted_separately(
    config: dict[str, Any], of_full: int, of_window: int, window: int
) -> None:
    """By layer types, for all layers, or from one layer on. A window as long as the context does not count."""
    kv = kv_size(config)
    assert (kv.bytes_per_token, kv.window_bytes_per_token, kv.window_tokens) == (of_full, of_window, window)


def test_linear_attention_layers_keep_no_tokens() -> None:
    """One in four layers of Qwen3-Next has KV."""
    kv = kv_size(QWEN3_NEXT)
    assert (kv.bytes_per_token, kv.state_layers) == (12 * 2 * 2 * 256 * 2, 36)


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 1.0), ("fp16", 1.0), ("fp8", 0.5), ("fp32", 2.0)])
def test_the_dtype_decides_the_bytes(dtype: str, share: float) -> None:
    """FP8 halves it."""
    assert kv_size(LLAMA_70B, KvDtype(dtype)).bytes_per_token == 327_680 * share


@pytest.mark.parametrize(
    ("config", "ranks", "copies"),
    [(LLAMA_70B, 1, 1), (LLAMA_70B, 8, 1), (LLAMA_70B, 16, 2), (QWEN3_30B_A3B, 8, 2), (DEEPSEEK_V3, 8, 8)],
)
def test_ranks_beyond_the_kv_heads_keep_copies(config: dict[str, Any], ranks: int, copies: int) -> None:
    """A latent cannot be split at all."""
    kv = kv_size(config, tensor_parallel=ranks)
    assert kv.copies == copies
    assert kv.bytes_per_token == copies * kv_size(config).bytes_per_token


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "t5"}, "num_hidden_layers: missing, but needed for architecture 't5'"),
        ({}, "num_hidden_layers: missing, but needed for architecture 'unknown'"),
        (without(LLAMA_8B, "hidden_size"), "hidden_size: missing"),
        (without(LLAMA_8B, "num_attention_heads"), "num_attention_heads: missing"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim: missing"),
        (without(GPT_OSS_120B, "sliding_window"), "sliding_window or attention_chunk_size: missing"),
        (without(QWEN2, "max_window_layers"), "max_window_layers: missing"),
        ({**LLAMA_8B, "num_key_value_heads": [8, 4]}, r"num_key_value_heads: \[8, 4\] is not a positive integer"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers: 0 is not a positive integer"),
        ({**LLAMA_8B, "layer_types": ["lightning"]}, "layer_types: 'lightning' is not supported; known: full_att"),
        ({**LLAMA_8B, "layer_types": ["mamba", "mlp"]}, "no layer of this architecture keeps KV"),
        ({**LLAMA_8B, "hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern: layers that differ"),
        ({**LLAMA_8B, "num_kv_shared_layers": 15}, "num_kv_shared_layers: layers that differ"),
    ],
)
def test_unsupported_configurations_are_refused(config: dict[str, Any], what: str) -> None:
    """The message names the key."""
    with pytest.raises(ConfigError, match=what):
        kv_size(config)


def test_layer_types_override_a_pattern() -> None:
    """They are what transformers made of the pattern."""
    config = {**LLAMA_8B, "hybrid_override_pattern": "M*", "layer_types": ["linear_attention", "full_attention"]}
    assert kv_size(config).bytes_per_token == 4_096


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    """Engines refuse to start, too."""
    with pytest.raises(ConfigError, match="--tp: 8 KV heads cannot be divided evenly by 3 ranks"):
        kv_size(LLAMA_8B, tensor_parallel=3)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 6.98),
        ("llama-3.1-70b", 68.5),
        ("qwen3-32b", 31.2),
        ("qwen3-30b-a3b", 2.72),
        ("qwen3-235b-fp8", 20.9),
        ("gpt-oss-120b", 4.54),
        ("deepseek-v3", 35.6),
    ],
)
def test_active_parameters_are_those_of_the_layers(model: str, billions: float) -> None:
    """The published number without embeddings: 8.03 less 2 * 0.525 for Llama-3.1-8B; of experts, only the active."""
    assert prefill_work(ARCHITECTURES[model]).active_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_experts_that_all_tokens_share_are_active() -> None:
    """Given by width or by number."""
    plain = prefill_work(QWEN3_30B_A3B).active_parameters
    for shared in ({"shared_expert_intermediate_size": 768}, {"n_shared_experts": 1}):
        assert prefill_work({**QWEN3_30B_A3B, **shared}).active_parameters - plain == 48 * 3 * 2048 * 768


def test_a_query_of_full_rank_has_more_parameters() -> None:
    """DeepSeek-V2-Lite has no `q_lora_rank`."""
    lite = prefill_work({**DEEPSEEK_V3, "q_lora_rank": None}).active_parameters
    low = 1536 * (7168 + 128 * 192)
    assert lite - prefill_work(DEEPSEEK_V3).active_parameters == 61 * (7168 * 128 * 192 - low)


def test_only_full_attention_grows_with_the_square() -> None:
    """Keys and values of 64 heads in half of the layers of gpt-oss."""
    assert prefill_work(GPT_OSS_120B).attention_flop_per_token2 == 18 * 64 * (64 + 64)
    assert prefill_work(DEEPSEEK_V3).attention_flop_per_token2 == 61 * 128 * (192 + 128)


@given(st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention"]), min_size=1))
def test_every_layer_is_counted_once(layer_types: list[str]) -> None:
    """As full, windowed or state."""
    config = {**LLAMA_8B, "layer_types": ["full_attention", *layer_types], "sliding_window": 10}
    kv = kv_size(config)
    with_kv = (kv.bytes_per_token + kv.window_bytes_per_token) // 4096
    assert with_kv + kv.state_layers == len(layer_types) + 1
