"""Reading first token and usage of Anthropic's responses, as four engines write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.request.response_reader import ResponseReader, reader_of
from router.types import Endpoint


def events(*datas: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (d["type"].encode(), json.dumps(d).encode()) for d in datas)


def start(**usage: int) -> dict[str, Any]:
    return {"type": "message_start", "message": {"id": "m", "content": [], "usage": usage}}


def delta(**fields: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": fields}


def end(**usage: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}


OPENED = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
WORD = delta(type="text_delta", text="Hé")
VLLM = events(
    start(input_tokens=195, output_tokens=0),
    OPENED,
    WORD,
    end(input_tokens=3, output_tokens=7, cache_read_input_tokens=192, cache_creation_input_tokens=0),
)
VLLM_PLAIN = events(start(input_tokens=195, output_tokens=0), OPENED, WORD, end(input_tokens=195, output_tokens=7))
LLAMACPP = events(
    start(input_tokens=3, cache_read_input_tokens=192, output_tokens=0), OPENED, WORD, end(output_tokens=7)
)


def read(response: bytes, step: int) -> ResponseReader:
    reader = reader_of(Endpoint.MESSAGES)
    for at in range(0, len(response), step):
        reader.feed(response[at : at + step])
    return reader


@pytest.mark.parametrize("step", [1, 7, 64, 10_000])
@pytest.mark.parametrize(
    ("response", "cached"), [(VLLM, 192), (VLLM_PLAIN, None), (LLAMACPP, 192)], ids=["vllm", "no details", "llamacpp"]
)
def test_the_prompt_is_what_was_computed_and_what_was_cached(response: bytes, cached: int | None, step: int) -> None:
    """Later values win: vLLM first reports the whole prompt as input, llama.cpp only its output at the end."""
    reader = read(response, step)
    assert (reader.prompt_tokens, reader.cached_tokens, reader.output_tokens) == (195, cached, 7)


@pytest.mark.parametrize(
    "first",
    [
        WORD,
        delta(type="thinking_delta", thinking="I"),
        delta(type="input_json_delta", partial_json='{"a'),
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", "input": {}}},
    ],
    ids=["text", "thinking", "arguments", "tool"],
)
def test_the_first_token_is_the_first_content(first: dict[str, Any]) -> None:
    """Neither the start, nor an empty block, nor a signature."""
    before = [start(input_tokens=1), OPENED, delta(type="signature_delta", signature="s"), {"type": "ping"}]
    reader = reader_of(Endpoint.MESSAGES)
    assert [reader.feed(events(event)) for event in (*before, first, first)] == [False] * 4 + [True, False]


def test_a_call_of_the_model_cannot_pass_as_usage() -> None:
    """The arguments of an unstreamed call are plain JSON; the engine's usage follows them."""
    faked = {"usage": {"input_tokens": 7, "cache_read_input_tokens": 7}}
    answer = {"content": [{"type": "tool_use", "input": faked}], "usage": {"input_tokens": 20, "output_tokens": 1}}
    reader = read(json.dumps(answer).encode(), 10_000)
    assert (reader.prompt_tokens, reader.cached_tokens) == (20, None)
