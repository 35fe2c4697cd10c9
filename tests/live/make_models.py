"""Creates the models of the live tests.

Three tiny random-weight models with real tokenizers: seeded, greedy-deterministic, a few MB of weights. Their speed and
output mean nothing, but blocks, events and cached tokens are real. Runs in vLLM's environment (torch, transformers):
`make_models.py HOME CHAT_TEMPLATE`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

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


class VisionFamily(NamedTuple):
    """What the models of the Qwen-VL family differ in. `unknown`: of `SMALL`, what its text model does not have."""

    config: Any
    model: Any
    processor: str
    sizes: dict[str, Any]
    vision: dict[str, Any]
    unknown: tuple[str, ...]


_SIZES = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}
QWEN_VL = {
    "qwen2-vl": VisionFamily(
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        "Qwen2VLProcessor",
        {"image_processor_type": "Qwen2VLImageProcessor", **_SIZES},
        {"embed_dim": 64, "hidden_size": SMALL["hidden_size"], "mlp_ratio": 2},
        ("head_dim", "dtype", "tie_word_embeddings"),
    ),
    "qwen2.5-vl": VisionFamily(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        "Qwen2_5_VLProcessor",
        {"image_processor_type": "Qwen2VLImageProcessor", **_SIZES},
        {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": SMALL["hidden_size"]}
        | {"fullatt_block_indexes": [0]},
        ("head_dim", "dtype", "tie_word_embeddings"),
    ),
    "qwen3-vl": VisionFamily(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        "Qwen3VLProcessor",
        {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
        | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": SMALL["hidden_size"]}
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 2304},
        ("dtype", "tie_word_embeddings"),
    ),
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


def make_qwen_vl(home: Path, name: str) -> None:
    """A vision model of the Qwen-VL family with Qwen3's tokenizer, which has the same special tokens, a template and
    picture sizes of its own."""
    target = home / "model" / f"tiny-{name}"
    copy_tokenizer(home / "tokenizer" / "qwen3", target)
    settings_path = target / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    settings.pop("chat_template", None)
    settings_path.write_text(json.dumps(settings, ensure_ascii=False, indent=1))
    shutil.copy(Path(__file__).with_name("qwen2_vl.jinja"), target / "chat_template.jinja")
    family = QWEN_VL[name]
    processor = {
        "processor_class": family.processor,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **family.sizes,
    }
    (target / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
    torch.manual_seed(0)
    text = {name: value for name, value in SMALL.items() if name not in family.unknown}
    text |= {"vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}}
    vision = {"depth": 1, "num_heads": 2, **family.vision}
    config = family.config(text_config=text, vision_config=vision, tie_word_embeddings=False, dtype="bfloat16")
    family.model(config).to(torch.bfloat16).save_pretrained(target)
    generation = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation))


if __name__ == "__main__":
    make_qwen3(Path(sys.argv[1]))
    make_llama(Path(sys.argv[1]), Path(sys.argv[2]))
    for vision_model in QWEN_VL:
        make_qwen_vl(Path(sys.argv[1]), vision_model)
