"""Bodies of OpenAI's Responses API: what is read, what is left to the engines, and what may be sent twice."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.errors import MalformedRequest
from router.policy.retry import is_repeatable
from router.request import parse
from router.request.parse import PARSERS
from router.types import Endpoint
from tests.kit import scenes

ITEMS = [{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": []}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": ITEMS} | fields).encode()


def fields_of(**fields: Any) -> dict[str, Any]:
    return PARSERS[Endpoint.RESPONSES].prompt_fields(PARSERS[Endpoint.RESPONSES].parse(body(**fields)))


def test_the_fields_of_the_prompt_stay_undecoded() -> None:
    """The input is split into its items; limits and sampling change no token."""
    given = {"instructions": "S", "tools": [], "reasoning": {"effort": "low"}, "truncation": "disabled"}
    parsed = PARSERS[Endpoint.RESPONSES].parse(body(**given, max_output_tokens=9, temperature=0.5, stream=True))
    fields = PARSERS[Endpoint.RESPONSES].prompt_fields(parsed)
    assert fields.keys() == {"input", *given}
    assert [msgspec.json.decode(item) for item in fields["input"]] == ITEMS
    assert {name: msgspec.json.decode(fields[name]) for name in given} == given
    assert (parsed.stream, parsed.max_output_tokens) == (True, 9)


def test_a_text_is_one_undecoded_value() -> None:
    """Any other input is left to the engine."""
    assert bytes(fields_of(input="Hi")["input"]) == b'"Hi"'
    assert bytes(fields_of(input=7)["input"]) == b"7"
    assert "input" not in fields_of(input=None) or bytes(fields_of(input=None)["input"]) == b"null"


@pytest.mark.parametrize("fields", [{"model": 1}, {"max_output_tokens": "many"}, {"previous_response_id": 7}])
def test_a_wrong_type_that_the_router_reads_is_refused(fields: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(MalformedRequest) as caught:
        PARSERS[Endpoint.RESPONSES].parse(body(**fields))
    assert caught.value.param == next(iter(fields))


def test_too_many_items_are_refused() -> None:
    """As messages of chats."""
    with pytest.raises(MalformedRequest, match=r"3 items, more than 2 \(limits\.max_messages\)") as caught:
        PARSERS[Endpoint.RESPONSES].parse(body(input=[7] * 3), max_messages=2)
    assert caught.value.param == "input"


def test_a_body_that_is_decoded_in_parts_is_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions, input and tools do not count as decoded."""
    given = {"instructions": "s" * 99, "tools": [{"name": "t"}], "previous_response_id": "resp_1", "stream": None}
    whole = fields_of(**given)
    monkeypatch.setattr(parse, "MAX_DECODED_BYTES", 40)
    assert msgspec.json.encode(whole) == msgspec.json.encode(fields_of(**given))
    assert whole["previous_response_id"] == "resp_1"


@pytest.mark.parametrize(
    ("fields", "repeatable"),
    [
        ({}, True),
        ({"store": False, "tools": [{"type": "function", "name": "f"}]}, True),
        ({"store": True}, False),
        ({"background": True}, False),
        ({"previous_response_id": "resp_1"}, False),
        ({"tools": [{"type": "mcp", "server_label": "s"}]}, False),
        ({"tools": [{"type": "web_search_preview"}]}, False),
    ],
)
def test_what_leaves_a_trace_is_not_sent_twice(fields: dict[str, Any], repeatable: bool) -> None:
    """A stored response, work in the background, calls that the engine makes."""
    request = scenes.request(endpoint=Endpoint.RESPONSES, body=b"", prompt=fields_of(**fields))
    assert is_repeatable(request, "POST") == repeatable
