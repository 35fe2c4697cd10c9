"""Creates the models of the live tests.

Two tiny random-weight models with real tokenizers: seeded, greedy-deterministic, a few MB of weights. Their speed and
output mean nothing, but blocks, events and cached tokens are real. Runs in vLLM's environment (torch, transformers):
`make_models.py HOME CHAT_TEMPLATE`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,  # CPU attention supports only certain head sizes
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,  # tied embeddings of random weights only repeat the last token
    "initializer_range": 0.3,
    "dtype": "bfloat16",
}


def copy_tokenizer(source: Path, target: Path) -> None:
    """Put a tokenizer next to the weights."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


def make_qwen3(home: Path) -> None:
    """Qwen3 with its own tokenizer and template."""
    target = home / "model" / "tiny-qwen3"
    copy_tokenizer(home / "tokenizer" / "qwen3", target)
    torch.manual_seed(0)
    special = {"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643}
    config = Qwen3Config(vocab_size=151936, **special, **SMALL)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    generation = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation))


def make_llama(home: Path, template: Path) -> None:
    """Llama with the DeepSeek tokenizer and the demo's chat template."""
    target = home / "model" / "tiny-llama"
    copy_tokenizer(home / "tokenizer" / "deepseek", target)
    settings_path = target / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    settings["chat_template"] = template.read_text()
    settings_path.write_text(json.dumps(settings, ensure_ascii=False, indent=1))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=129280, bos_token_id=0, eos_token_id=1, pad_token_id=1, **SMALL)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)


if __name__ == "__main__":
    make_qwen3(Path(sys.argv[1]))
    make_llama(Path(sys.argv[1]), Path(sys.argv[2]))
