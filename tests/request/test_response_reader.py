"""Reading first token and usage of a response."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from router.request.response_reader import ResponseReader


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(id="c", choices=[{"index": 0, "delta": fields, "logprobs": None, "finish_reason": None}])


ROLE = delta(role="assistant", content="")
USAGE = event(
    choices=[],
    usage={"prompt_tokens": 2016, "total_tokens": 2020, "prompt_tokens_details": {"cached_tokens": 1920}},
)
DONE = b"data: [DONE]\n\n"
STREAM = b": keep-alive\n\n" + ROLE + delta(content="Hé") + delta(content="llo") + USAGE + DONE


def read(*pieces: bytes) -> tuple[ResponseReader, list[int]]:
    """The reader, and the numbers of the pieces with a first token."""
    reader = ResponseReader()
    return reader, [number for number, piece in enumerate(pieces) if reader.feed(piece)]


def first_token_at(stream: bytes) -> int:
    """Number of bytes up to the first token."""
    reader = ResponseReader()
    return next(at for at in range(len(stream)) if reader.feed(stream[at : at + 1])) + 1


def test_the_first_token_is_the_first_text_and_not_the_role() -> None:
    """Fed byte by byte, it is found at its first character."""
    assert STREAM[: first_token_at(STREAM)].endswith(b'"content":"H')


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_the_result_does_not_depend_on_where_a_stream_is_cut(cut: int) -> None:
    """Inside a word, a number or a character."""
    reader, first = read(STREAM[:cut], STREAM[cut:])
    assert first == [0 if cut >= first_token_at(STREAM) else 1]
    assert (reader.prompt_tokens, reader.cached_tokens) == (2016, 1920)


def test_an_empty_usage_does_not_replace_an_earlier_one() -> None:
    """In one piece or in two."""
    silent = event(choices=[], usage=None)
    for pieces in ((USAGE + silent,), (USAGE, silent)):
        assert read(*pieces)[0].prompt_tokens == 2016


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30).map(sorted))
def test_any_pieces_give_the_same_result(cuts: list[int]) -> None:
    """Down to single bytes; the first token is reported once."""
    edges = [0, *cuts, len(STREAM)]
    reader, first = read(*(STREAM[start:end] for start, end in pairwise(edges)))
    assert len(first) == 1
    assert (reader.prompt_tokens, reader.cached_tokens) == (2016, 1920)


@pytest.mark.parametrize(
    "silent",
    [
        ROLE,
        delta(role="assistant", content=None),
        delta(reasoning_content=""),
        delta(tool_calls=[{"index": 0, "id": "t", "function": {"name": "f", "arguments": ""}}]),
        event(choices=[{"index": 0, "text": ""}]),
        b": keep-alive\n\n",
        USAGE,
        b"",
    ],
)
def test_chunks_without_text_are_not_tokens(silent: bytes) -> None:
    """Roles, empty deltas, tool names, comments, usage."""
    assert read(silent)[1] == []


@pytest.mark.parametrize(
    "token",
    [
        delta(content='"'),
        delta(content="\n"),
        delta(reasoning_content="hm"),
        delta(reasoning="hm"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        event(choices=[{"index": 0, "text": " a"}]),
        b'{"choices": [{"message": {"role": "assistant", "content": "whole"}}]}',
    ],
)
def test_text_reasoning_and_arguments_are_tokens(token: bytes) -> None:
    """In chats, completions and unstreamed responses, with or without a space after the colon."""
    assert read(ROLE, token)[1] == [1]


@pytest.mark.parametrize(
    "text", ['"cached_tokens": 9', '"usage": {"prompt_tokens": 9, "cached_tokens": 9}', '\\"usage": {']
)
def test_a_model_cannot_write_its_own_usage(text: str) -> None:
    """Quotes in generated text are escaped."""
    reader, _ = read(ROLE, delta(content=text), USAGE, DONE)
    assert (reader.prompt_tokens, reader.cached_tokens) == (2016, 1920)
    alone, _ = read(ROLE, delta(content=text), DONE)
    assert (alone.prompt_tokens, alone.cached_tokens) == (None, None)


def test_the_last_usage_counts() -> None:
    """Engines repeat it with every chunk, or send null with all but the last."""
    early = event(choices=[], usage={"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}})
    empty = event(choices=[], usage=None)
    reader, _ = read(early, ROLE, empty, delta(content="x" * 9000), USAGE, DONE)
    assert (reader.prompt_tokens, reader.cached_tokens) == (2016, 1920)


def test_a_reported_zero_is_a_value() -> None:
    """None means not reported."""
    zero = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}
    assert read(event(usage=zero))[0].cached_tokens == 0
    assert read(event(usage={"prompt_tokens": 5, "prompt_tokens_details": None}))[0].cached_tokens is None


def test_memory_does_not_grow_with_the_response() -> None:
    """Bytes without a token or usage are not kept."""
    reader = ResponseReader()
    for _ in range(200):
        reader.feed(b"x" * 10_000)
    kept = [value for value in astuple(reader) if isinstance(value, bytes)]
    assert sum(map(len, kept)) < 100_000


SIGNS = [b'"usage": {', b'"usage"', b'"cached_tokens": ', b'"prompt_tokens":', b"9" * 5000, b"12", b'"content":"', b"}"]


@given(pieces=st.lists(st.sampled_from(SIGNS) | st.binary(max_size=20), max_size=20))
def test_any_bytes_are_read_without_an_error(pieces: list[bytes]) -> None:
    """Long numbers, truncated keys, bytes that are not text."""
    reader, first = read(*pieces)
    assert len(first) <= 1
    for count in (reader.cached_tokens, reader.prompt_tokens, reader.output_tokens):
        assert count is None or 0 <= count < 10**12


def test_a_usage_object_at_the_very_start_of_a_piece_is_kept() -> None:
    """Also if a null follows in the same piece."""
    reader, _ = read(b'"usage":{"prompt_tokens":7,"completion_tokens":2}}\n', b'data: {"usage":null}\n')
    assert reader.prompt_tokens == 7
    reader, _ = read(b'"usage":{"prompt_tokens":7}}\ndata: {"usage":null}\n')
    assert reader.prompt_tokens == 7
