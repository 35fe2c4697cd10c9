"""Unstreamed responses converted to streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.frontends.http.relay import as_stream
from router.types import Endpoint

USAGE = {"prompt_tokens": 5, "completion_tokens": 1}


def events(stream: bytes) -> list[dict[str, Any]]:
    """All events before the end mark."""
    lines = stream.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def chat(message: dict[str, Any], **asked: Any) -> list[dict[str, Any]]:
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    whole = {"id": "c", "created": 7, "model": "m", "object": "chat.completion", "choices": [choice], "usage": USAGE}
    return events(as_stream(Endpoint.CHAT, json.dumps(whole).encode(), json.dumps(asked).encode()))


def test_a_chat_is_a_message_and_a_finish_reason() -> None:
    """Two chunks, in the form that clients merge."""
    said, end = chat({"role": "assistant", "content": "no", "refusal": None})
    assert (said["id"], said["created"], said["model"], said["object"]) == ("c", 7, "m", "chat.completion.chunk")
    assert said["choices"][0]["delta"] == {"role": "assistant", "content": "no"}
    assert said["choices"][0]["finish_reason"] is None
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")


def test_tool_calls_are_numbered() -> None:
    """As in deltas."""
    said, _ = chat({"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]})
    assert said["choices"][0]["delta"]["tool_calls"][0]["index"] == 0


def test_usage_comes_last_and_only_where_requested() -> None:
    """With stream_options."""
    *_, last = chat({"content": "no"}, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert all("usage" not in event for event in chat({"content": "no"}, stream_options={"include_usage": False}))


def test_a_completion_is_one_event() -> None:
    """Text and finish reason."""
    whole = {"id": "c", "choices": [{"index": 0, "text": "no", "finish_reason": "stop"}], "usage": USAGE}
    (event,) = events(as_stream(Endpoint.COMPLETIONS, json.dumps(whole).encode(), b"{}"))
    assert (event["object"], event["choices"]) == ("text_completion", whole["choices"])


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"null", b'"x"', b"{}", b'{"choices": 3}', b'{"choices": [1]}', b'{"choices": [{"message": 1}]}'],
)
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_an_invalid_response_is_a_value_error(endpoint: Endpoint, answer: bytes) -> None:
    """Pods may send anything."""
    if endpoint is Endpoint.COMPLETIONS and b"message" in answer:
        assert as_stream(endpoint, answer, b"{}")
    else:
        with pytest.raises(ValueError, match=r"not a response|malformed|truncated|JSON"):
            as_stream(endpoint, answer, b"{}")
