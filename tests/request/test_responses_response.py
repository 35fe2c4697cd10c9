"""Reading first token, usage and id of responses of OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.request.response_reader import ResponseReader, reader_of
from router.types import Endpoint

USAGE = {
    "input_tokens": 195,
    "input_tokens_details": {"cached_tokens": 192, "cache_write_tokens": 0, "input_tokens_per_turn": []},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 202,
}
TOOL = {"type": "function", "name": "f", "parameters": {"properties": {"usage": {"type": "object"}, "id": {"x": "y"}}}}


def response(**fields: Any) -> dict[str, Any]:
    return {"id": "resp_a-1", "object": "response", "output": [], "tools": [TOOL], "usage": None, **fields}


def events(*datas: tuple[str, dict[str, Any]]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps(data).encode()) for name, data in datas)


CREATED = events(
    ("response.created", {"response": response(instructions="event: response.x\n" * 9000)}),
    ("response.in_progress", {"response": response()}),
)
ADDED = events(("response.output_item.added", {"item": {"id": "msg_1", "content": []}}))
REST = events(
    ("response.output_text.delta", {"delta": "Hé"}), ("response.completed", {"response": response(usage=USAGE)})
)
UNSTREAMED = json.dumps(response(output=[{"id": "msg_1", "content": [{"text": "Hé"}]}], usage=USAGE)).encode()


def read(response: bytes, step: int) -> ResponseReader:
    reader = reader_of(Endpoint.RESPONSES)
    for at in range(0, len(response), step):
        reader.feed(response[at : at + step])
    return reader


@pytest.mark.parametrize("step", [61, 4096, 1_000_000])
@pytest.mark.parametrize("whole", [CREATED + ADDED + REST, UNSTREAMED], ids=["stream", "unstreamed"])
def test_usage_and_id_are_read(whole: bytes, step: int) -> None:
    """Usage is that of the last event. The id is the first, however the tools of the client look."""
    reader = read(whole, step)
    assert (reader.prompt_tokens, reader.cached_tokens, reader.output_tokens) == (195, 192, 7)
    assert reader.response_id == "resp_a-1"
    assert reader.has_token


@pytest.mark.parametrize("step", [61, 64, 4096, 1_000_000])
def test_the_first_token_is_the_first_event_after_created_and_in_progress(step: int) -> None:
    """These precede the prefill, however long they are: they repeat the client's instructions and tools."""
    assert len(CREATED) > 2 * 64 * 1024
    reader = read(CREATED, step)
    assert reader.in_preamble and not reader.has_token
    reader = read(CREATED + ADDED, step)
    assert reader.has_token and not reader.in_preamble


@pytest.mark.parametrize("begin", [b": hi\n\n", b"data: {}\n\n", b"event: error\ndata: {}\n\n"])
def test_a_stream_that_begins_otherwise_is_not_held(begin: bytes) -> None:
    """Such as that of an engine without names of events."""
    assert not read(begin, 4096).in_preamble


@pytest.mark.parametrize("given", ["", "a" * 129, "a/../b", "é", "a.b", "a b"])
def test_an_id_that_could_not_be_requested_is_not_read(given: str) -> None:
    """Clients of vLLM may choose it."""
    assert read(json.dumps(response(id=given, output=[], tools=[])).encode(), 4096).response_id == ""
