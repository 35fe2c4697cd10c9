"""Compares the router's prompts with pictures, and their blocks, with those of a real vLLM with a tiny Qwen2-VL.

The recording (`tests/live/record_goldens.py pictures`) has requests of three APIs with pictures of all formats, their
tokens and cached tokens, and every event message in between.
"""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from router.config.tokenizer_files import TokenizerSource
from router.engines.engine_catalog import ENGINES
from router.hashing import generation_seed, hash_array, token_array
from router.index.blockmap import BlockMap
from router.prompt.fingerprint import Fingerprinter
from router.prompt.media import media_parts
from router.prompt.pictures.picture_reader import PictureIdentities, PictureReader, expanded, hash_pictures, read_sizes
from router.prompt.pictures.vllm_identifier import identify
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation, PodId, PromptPrefix, Tier
from tests.index.decoding import decode_batch
from tests.kit import scenes
from tests.loaded_tokenizers import loaded_tokenizer
from tests.parity.test_chat_tokens import GOLDENS, QWEN3

LINES: list[dict[str, Any]] = [
    json.loads(line) for line in (GOLDENS / "vllm_pictures.jsonl").read_text("utf-8").split("\n") if line
]
TEMPLATE = Path(__file__).parents[1] / "live" / "qwen2_vl.jinja"
PAD = 151655
BLOCK = 32
IDENTITIES = PictureIdentities(identify, "tiny-qwen2-vl")
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
POD = PodId("vllm")


def picture_reader() -> PictureReader:
    sizes = read_sizes(PROCESSOR)
    assert sizes is not None
    return PictureReader(sizes, PAD, trusts_uuids=True)


def generation_of(line: dict[str, Any], block: int) -> Generation:
    return Generation(model="tiny", block_size_tokens=block, salt=line["body"].get("cache_salt", ""))


def prefix_of(line: dict[str, Any], block: int) -> PromptPrefix:
    """The prompt from the engine's text tokens and our pictures, for which the text has one placeholder each."""
    parts = media_parts(line["body"]["messages"])
    pictures = picture_reader().leading(parts, IDENTITIES)
    assert len(pictures) == len(parts)
    given = line["token_ids"]
    text = token_array(token for at, token in enumerate(given) if token != PAD or given[at - 1] != PAD)
    tokens, exact_tokens, placed = expanded(text, len(text), PAD, pictures)
    assert exact_tokens == len(tokens)
    generation = generation_of(line, block)
    hashes = hash_pictures(hash_array(), tokens, placed, block, generation_seed(generation))
    return PromptPrefix(generation, tokens, hashes)


def cached_tokens(blocks: BlockMap, prefix: PromptPrefix) -> int:
    """Cached tokens of the engine for a match: whole blocks of its own, and at least one token is computed."""
    matched = blocks.match(prefix).get(POD, (0, 0, 0, 0))[Tier.GPU] * prefix.block_size_tokens
    return min(matched, len(prefix.tokens) - 1) // BLOCK * BLOCK


def apply(blocks: BlockMap, line: dict[str, Any]) -> None:
    for event in decode_batch(base64.b64decode(line["frames"][-1])):
        blocks.apply(POD, event)


@pytest.mark.parametrize("block", [8, 32])
def test_pictures_and_blocks_are_those_of_the_engine(block: int) -> None:
    """All formats and modes, several pictures, growing chats, the same text with another picture, uuids and a salt: the
    tokens are equal, and as many of them are cached as the engine reports. The router's blocks may be smaller."""
    blocks = BlockMap()
    blocks.add_holder(POD, Generation(model="tiny", block_size_tokens=block))
    compared = 0
    for line in LINES:
        if line["kind"] == "event":
            apply(blocks, line)
        elif "token_ids" in line:
            prefix = prefix_of(line, block)
            assert list(prefix.tokens) == line["token_ids"], line["body"]
            assert cached_tokens(blocks, prefix) == line["cached_tokens"], line["body"]
            compared += 1
    assert compared >= 20
    assert blocks.cache_of(POD).blocks.orphans == 0


def test_whole_prompts_of_three_apis_are_those_of_the_engine() -> None:
    """From the body alone, as the edge receives it."""
    if not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer in {QWEN3}: tests/live/install.sh gets it")
    tokenizer = loaded_tokenizer(TokenizerSource(str(QWEN3), str(TEMPLATE)), fast=True)
    template, generation = ChatTemplate(tokenizer, pictures=picture_reader()), generation_of(LINES[0], BLOCK)
    fingerprinter = Fingerprinter(tokenizer, template, generation)
    blocks = BlockMap()
    blocks.add_holder(POD, fingerprinter.generation)
    compared = set()
    for line in LINES:
        if line["kind"] == "event":
            apply(blocks, line)
            continue
        endpoint = Endpoint(line["path"])
        fields = PARSERS[endpoint].prompt_fields(PARSERS[endpoint].parse(json.dumps(line["body"]).encode()))
        salt = line["body"].get("cache_salt", "")
        request = scenes.request(endpoint=endpoint, model="tiny", body=b"", prompt=fields, salt=salt)
        conversion = ENGINES["vllm"].conversions[endpoint] if endpoint.api.is_converted else None
        rendered = fingerprinter.render(fingerprinter.open(request, conversion, IDENTITIES))
        prefix = fingerprinter.finish(fingerprinter.look_up(rendered))
        assert prefix.token_count == line["prompt_tokens"]
        assert array("I", prefix.tokens).tolist() == line.get("token_ids", list(prefix.tokens))
        assert cached_tokens(blocks, prefix) == line["cached_tokens"], line["body"]
        compared.add(endpoint)
    assert compared == {Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES}
