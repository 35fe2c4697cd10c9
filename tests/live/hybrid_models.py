"""Tiny models whose layers keep windows or states, for vLLM's `--load-format dummy`: a configuration and a tokenizer.

Their output means nothing, but groups, events and cached tokens are real.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WINDOW_TOKENS = 128
_SMALL = {
    "vocab_size": 151936,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "attention_bias": False,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_EXPERTS = {"num_experts_per_tok": 2}

CONFIGURATIONS: Mapping[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000.0,
    },
    "gptoss": _EXPERTS
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": _YARN | {"original_max_position_embeddings": 4096},
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "qwen3next": _EXPERTS
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW_TOKENS,
    },
}


def make_model(name: str, tokenizer: Path, target: Path) -> Path:
    """Write the configuration of a model next to a copy of the tokenizer. Returns its folder."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(_SMALL | CONFIGURATIONS[name]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, target / file)
    return target
