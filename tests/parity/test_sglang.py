"""Compares the router with SGLang's own Python: tokens of chats and `/v1/messages`, and the events of its radix cache.

Recorded by `tests/live/record_goldens.py sglang`.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from xxhash import xxh3_64_hexdigest

from router.engines.engine_catalog import ENGINES
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.types import Endpoint, Generation, PodId, PromptPrefix
from tests.index.decoding import decode_batch
from tests.kit import scenes
from tests.loaded_tokenizers import loaded_tokenizer
from tests.parity.test_chat_tokens import DEMO, GOLDENS
from tests.parity.test_events import decoded, frames

POD = PodId("sglang")
NOTHING = (0, 0, 0, 0)


def lines(name: str) -> list[dict[str, Any]]:
    text = (GOLDENS / f"sglang_{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES])
def test_bodies_have_the_tokens_that_sglang_gave_them(endpoint: Endpoint) -> None:
    """Those that the router reads."""
    tokenizer = loaded_tokenizer(DEMO)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="tiny"))
    equal = 0
    for case in lines("tokens"):
        if case["endpoint"] != endpoint.value:
            continue
        request = scenes.request(endpoint=endpoint, model="tiny", body=b"", prompt=case["body"])
        try:
            found = fingerprinter.fingerprint(request, ENGINES["sglang"].conversions.get(endpoint))
        except Unrenderable:
            continue
        tokens = array("I", found.tokens)
        assert (len(tokens), xxh3_64_hexdigest(tokens.tobytes())) == (case["tokens"], case["digest"]), case["body"]
        equal += 1
    assert equal >= (30 if endpoint is Endpoint.CHAT else 200)


@pytest.mark.parametrize("block_tokens", [8, 16])
def test_the_map_has_what_the_radix_cache_has(block_tokens: int) -> None:
    """After every step of a life with splits of nodes, evictions and a flush, for every prompt."""
    generation = Generation(model="tiny", block_size_tokens=block_tokens)
    blocks = BlockMap()
    blocks.add_holder(POD, generation)
    steps = lines("events")
    events = decoded([frames(step) for step in steps])
    seen = [list(decoded_step) for decoded_step in _by_step(steps)]
    assert sum(map(len, seen)) == len(list(events))
    for step, batch in zip(steps, seen, strict=True):
        for event in batch:
            blocks.apply(POD, event)
        for tokens, cached in zip(step["prompts"], step["cached"], strict=True):
            hashes = hash_blocks(token_array(tokens), block_tokens, generation_seed(generation))
            prefix = PromptPrefix(generation, token_array(tokens), hashes)
            assert sum(blocks.match(prefix).get(POD, NOTHING)) * block_tokens == cached, step["step"]
    assert blocks.cache_of(POD).blocks.orphans == 0
    assert blocks.cache_of(POD).blocks.rejected_reason == ""
    assert {step["step"] for step in steps} == {"insert", "evict", "flush"}


def _by_step(steps: list[dict[str, Any]]) -> list[list[Any]]:
    return [list(decode_batch(frames(step)[-1])) for step in steps]
