"""Creates a tiny vision model whose pictures the router learns: Idefics3, which has tiles and separators.

As `make_models.py`: `python -m tests.live.make_other_vision HOME`, in the root of the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

from tests.live.make_models import SMALL, copy_tokenizer

TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string %}{{ message['content'] }}{% else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'image' %}<image>{% elif 'text' in content %}{{ content['text'] }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
TEXT = {name: value for name, value in SMALL.items() if name not in ("dtype", "tie_word_embeddings")}
TEXT |= {"vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643}
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 112, "patch_size": 14}
MODEL = {"tie_word_embeddings": False, "dtype": "bfloat16"}
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
PIXELS |= dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True)
NAMES = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def make_tokenizer(home: Path, target: Path) -> int:
    """Qwen3's, with further special tokens, and a template. Returns the token of `<image>`."""
    copy_tokenizer(home / "tokenizer" / "qwen3", target)
    names = {"image_token": "<image>", **NAMES}
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    first: int = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = {str(first + n): {"content": text, **flags} for n, text in enumerate([*names.values(), *TILES])}
    tokenizer["added_tokens"] += [{"id": int(token), **fields} for token, fields in added.items()]
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings.setdefault("added_tokens_decoder", {}).update(added)
    settings |= {"image_token": "<image>", "extra_special_tokens": names}
    write(target, "tokenizer.json", tokenizer)
    write(target, "tokenizer_config.json", settings)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    write(target, "generation_config.json", {"eos_token_id": [151645, 151643], "do_sample": False})
    return first


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    """A JSON file."""
    (folder / name).write_text(json.dumps(content, ensure_ascii=False))


def make_idefics3(home: Path) -> None:
    """Pictures have as many tiles as their size needs, each with its row and column."""
    target = home / "model" / "tiny-idefics3"
    image = make_tokenizer(home, target)
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT),
        vision_config=VISION,
        image_token_id=image,
        scale_factor=2,
        pad_token_id=151643,
        **MODEL,
    )
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(target)
    sizes = {"size": {"longest_edge": 448}, "max_image_size": {"longest_edge": 112}, "do_image_splitting": True}
    kind = {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"}
    write(target, "preprocessor_config.json", {**kind, **sizes, **PIXELS, "do_pad": True, "resample": 1})
    write(target, "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 16})


if __name__ == "__main__":
    make_idefics3(Path(sys.argv[1]))
