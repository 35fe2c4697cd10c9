"""The cached tokens that a client receives."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.handoff import usage
from router.engines.handoff.usage import MAX_HELD_BYTES, UsageCorrection

USAGE = '"usage":{"prompt_tokens":96,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":%s},"x":1.0e0}'
TRICKY = '"cached_tokens": 95, {"usage":{"prompt_tokens_details":{"cached_tokens":95}}}\n\ndata: é'


def whole(cached: object, text: str = "hi") -> bytes:
    return (f'{{"id" : "x","choices":[{{"text":{json.dumps(text)}}}],' + USAGE % cached + "}").encode()


def stream(cached: object, end: str = "\n") -> bytes:
    """With a comment, usage in two chunks, texts that look like usage, and the end."""
    texts = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("hi", TRICKY)]
    chunks = [*texts, whole(cached, TRICKY).decode(), '{"choices":[],' + USAGE % cached + "}", "[DONE]"]
    return (f": keep-alive{end}{end}" + "".join(f"data: {chunk}{end}{end}" for chunk in chunks)).encode()


def corrected(text: bytes, cached_tokens: int | None, *, streamed: bool, cuts: list[int] | None = None) -> bytes:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts or []), len(text)]
    correction = UsageCorrection(cached_tokens, streamed)
    out = [correction.feed(text[start:end]) for start, end in pairwise(places)]
    return b"".join([*out, correction.end()])


def test_a_whole_response_has_the_cached_tokens_of_the_prefill_pod() -> None:
    """No other byte changes: text that looks like usage stays."""
    assert corrected(whole(95, TRICKY), 16, streamed=False) == whole(16, TRICKY)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_has_them_too(end: str) -> None:
    """In every chunk with a usage."""
    assert corrected(stream(95, end), 16, streamed=True) == stream(16, end)
    assert stream(95, end) != stream(16, end)


@given(st.lists(st.integers(0, len(stream(95))), max_size=12), st.booleans(), st.integers(0, 10**6))
def test_the_division_into_chunks_makes_no_difference(cuts: list[int], streamed: bool, cached: int) -> None:
    text, wanted = (stream(95), stream(cached)) if streamed else (whole(95, TRICKY), whole(cached, TRICKY))
    assert corrected(text, cached, streamed=streamed, cuts=cuts) == wanted


@given(st.lists(st.integers(0, 200), max_size=6), st.binary(max_size=60), st.text(max_size=30), st.booleans())
def test_answers_without_usage_do_not_change(cuts: list[int], noise: bytes, text: str, streamed: bool) -> None:
    """Noise, and any text of a model."""
    chunk = json.dumps({"choices": [{"text": TRICKY + text}]}).encode()
    body = noise + b"\ndata: " + chunk + b"\n\n"
    assert corrected(body, 16, streamed=streamed, cuts=cuts) == body


@pytest.mark.parametrize(
    "text",
    [
        b'{"usage":{"prompt_tokens":9}}',
        b'{"usage":{"prompt_tokens_details":null}}',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}',
        b'{"usage":null,"cached_tokens":95}',
        b'{"choices":[{"message":{"x":{"cached_tokens":95}}}],"usage":{"prompt_tokens_details":{"audio_tokens":1}}}',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":95}}',
        b"",
    ],
)
def test_nothing_is_added_where_the_engine_omits_it(text: bytes) -> None:
    """A number of that name elsewhere stays."""
    assert corrected(text, 16, streamed=False) == text
    assert corrected(b"data: " + text, 16, streamed=True) == b"data: " + text


def test_the_right_one_of_several_numbers_is_changed() -> None:
    """The name may also occur in other objects."""
    text = b'{"a":{"cached_tokens":1},"usage":{"prompt_tokens_details":{"cached_tokens" : %d}},"z":{"cached_tokens":2}}'
    assert corrected(text % 95, 16, streamed=False) == text % 16


def test_only_an_unfinished_line_is_held_back() -> None:
    """Complete lines are returned at once."""
    correction = UsageCorrection(16, stream=True)
    assert correction.feed(b'data: {"a":1}\n\nda') == b'data: {"a":1}\n\n'
    assert correction.feed(b"ta: [D") == b""
    assert correction.feed(b"ONE]\n") == b"data: [DONE]\n"
    assert correction.end() == b""


@pytest.mark.parametrize("streamed", [True, False])
def test_held_bytes_are_limited(streamed: bool) -> None:
    """A line or answer without an end is passed on unchanged."""
    correction, sent, seen = UsageCorrection(16, streamed), 0, 0
    piece = b"data: " + b"x" * 65536
    while sent < 2 * MAX_HELD_BYTES:
        seen += len(correction.feed(piece))
        sent += len(piece)
        assert sent - seen <= MAX_HELD_BYTES
    assert seen + len(correction.end()) == sent


def test_a_last_line_without_an_end_is_corrected_too() -> None:
    """A pod may close instead of writing a newline."""
    assert corrected(b"data: " + whole(95), 16, streamed=True) == b"data: " + whole(16)


def test_without_a_number_nothing_is_changed_or_held() -> None:
    """The prefill pod did not report it."""
    correction = UsageCorrection(None, stream=False)
    assert correction.feed(whole(95)) == whole(95)
    assert correction.end() == b""


def test_of_many_numbers_only_the_last_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try reads the whole response again: 20,000 of them took minutes."""
    reads = 0
    read = usage._reported

    def count(response: bytes) -> int | None:
        nonlocal reads
        reads += 1
        return read(response)

    monkeypatch.setattr(usage, "_reported", count)
    others = b",".join([b'{"cached_tokens":1}'] * 20_000)
    text = b'{"a":[%b],"usage":{"prompt_tokens_details":{"cached_tokens":%%d}}}' % others
    assert corrected(text % 95, 16, streamed=False) == text % 16
    hidden = b'{"usage":{"prompt_tokens_details":{"cached_tokens":95}},"a":[%b]}' % others
    assert corrected(hidden, 16, streamed=False) == hidden
    assert reads <= 10
