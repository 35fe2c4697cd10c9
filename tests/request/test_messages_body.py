"""Bodies of Anthropic's API: what is read, and what is left to the engines."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.errors import MalformedRequest
from router.request import parse
from router.request.parse import PARSERS
from router.types import Endpoint

ASKED = [{"role": "user", "content": "Hi"}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": ASKED} | fields).encode()


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.COUNT_TOKENS])
def test_the_fields_of_the_prompt_stay_undecoded(endpoint: Endpoint) -> None:
    """Only those; sampling and metadata change no token."""
    given = {"system": "S", "tools": [], "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    parsed = PARSERS[endpoint].parse(body(**given, metadata={"user_id": "u"}, temperature=0.5, stream=True))
    fields = PARSERS[endpoint].prompt_fields(parsed)
    assert fields.keys() == {"messages", *given}
    assert [bytes(message) for message in fields["messages"]] == [json.dumps(ASKED[0]).encode()]
    assert {name: msgspec.json.decode(fields[name]) for name in given} == given
    assert (parsed.stream, parsed.max_tokens) == (True, 9)


@pytest.mark.parametrize("fields", [{"messages": "x"}, {"model": 1}, {"max_tokens": "many"}, {"stream": "often"}])
def test_a_wrong_type_that_the_router_reads_is_refused(fields: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(MalformedRequest) as caught:
        PARSERS[Endpoint.MESSAGES].parse(body(**fields))
    assert caught.value.param == next(iter(fields))


def test_too_many_messages_are_refused() -> None:
    """As in chats. No messages, and any kind of content, are left to the engine."""
    with pytest.raises(MalformedRequest, match="max_messages"):
        PARSERS[Endpoint.MESSAGES].parse(body(messages=ASKED * 3), max_messages=2)
    assert PARSERS[Endpoint.MESSAGES].parse(body(messages=[])).messages == []
    assert len(PARSERS[Endpoint.MESSAGES].parse(body(messages=[7])).messages) == 1


def test_a_body_that_is_decoded_in_parts_is_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """System prompt and tools do not count as decoded."""
    sent = body(system=["s"] * 9, tools=[{"name": "t"}], stream=None)
    whole = PARSERS[Endpoint.MESSAGES].prompt_fields(PARSERS[Endpoint.MESSAGES].parse(sent))
    monkeypatch.setattr(parse, "MAX_DECODED_BYTES", 40)
    parts = PARSERS[Endpoint.MESSAGES].prompt_fields(PARSERS[Endpoint.MESSAGES].parse(sent))
    assert msgspec.json.encode(whole) == msgspec.json.encode(parts)
