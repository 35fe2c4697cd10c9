"""How vLLM makes a chat of a body of the Responses API; the tokens of many are in `tests/parity`."""

from __future__ import annotations

from typing import Any

import pytest

from router.prompt.apis.vllm_responses import VllmResponses
from router.prompt.conversation import UnreadReason, Unrenderable

CONVERSION = VllmResponses(None)
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Sum"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
USER = {"role": "user", "content": "Hi"}


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(CONVERSION.chat({"input": list(items), **fields})["messages"])


def call(name: str = "look", arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"id": "c1", "function": {"name": name, "arguments": arguments}, "type": "function"}


def test_a_text_is_a_user_message_behind_the_instructions() -> None:
    """Without instructions it is the only one."""
    hi = {"role": "user", "content": "Hi"}
    assert CONVERSION.chat({"input": "Hi", "instructions": "S"})["messages"] == [
        {"role": "system", "content": "S"},
        hi,
    ]
    assert CONVERSION.chat({"input": "Hi", "instructions": ""})["messages"] == [hi]


def test_items_of_the_assistant_join_until_a_field_is_taken() -> None:
    """Calls always join."""
    assert messages(THOUGHT, SAID, CALL, {**CALL, "namespace": "ns"}, SAID) == [
        {"role": "assistant", "reasoning": "Sum", "content": "A", "tool_calls": [call(), call("ns__look")]},
        {"role": "assistant", "content": "A"},
    ]


def test_only_the_first_part_of_the_assistant_counts() -> None:
    """This holds for text and for reasoning."""
    parts = [{"type": "output_text", "text": text} for text in "AB"]
    thoughts = [{"type": "reasoning_text", "text": text} for text in "TU"]
    assert messages({**SAID, "content": parts}, {**THOUGHT, "content": thoughts}) == [
        {"role": "assistant", "content": "A", "reasoning": "T"}
    ]


def test_outputs_of_tools_are_messages_with_their_parts() -> None:
    """A custom tool has a text as its arguments."""
    parts = [{"type": "input_text", "text": "21 C"}]
    assert messages(
        {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "é"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": parts},
    ) == [
        {"role": "assistant", "tool_calls": [call("sh", '{"input": "é"}')]},
        {"role": "tool", "content": parts, "tool_call_id": "c1"},
    ]


def test_a_part_with_a_uuid_and_a_picture_is_a_picture() -> None:
    """Its type makes no difference, as in vLLM."""
    named = {"type": "input_text", "text": "a", "image_url": "data:,", "uuid": "b"}
    picture = {"type": "input_text", "image_url": "data:,", "uuid": "b"}
    assert messages({"role": "user", "content": [named]}) == [{"role": "user", "content": [picture]}]


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_an_unfinished_last_item_is_continued(status: str) -> None:
    """The item is the assistant's; a call is not continued."""
    chat = CONVERSION.chat({"input": [USER, {**SAID, "status": status}]})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in CONVERSION.chat({"input": [USER, {**CALL, "status": status}]})


def test_tools_are_functions() -> None:
    """Those of a namespace carry its name, custom ones take a text, others vanish: an empty list differs from none."""
    function = {"type": "function", "name": "f", "parameters": {"b": 1, "a": 2}}
    space = {"type": "namespace", "name": "ns", "description": "d", "tools": [function]}
    given = [function, space, {"type": "custom", "name": "sh"}, {"type": "web_search_preview"}]
    tools = CONVERSION.chat({"input": "Hi", "tools": given})["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["f", "ns__f", "sh"]
    assert list(tools[0]["function"]["parameters"]) == ["b", "a"]
    assert tools[2]["function"]["parameters"]["required"] == ["input"]
    assert CONVERSION.chat({"input": "Hi", "tools": given[3:]})["tools"] == []
    assert "tools" not in CONVERSION.chat({"input": "Hi", "tools": []})


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"truncation": "auto"},
        {"previous_input_messages": []},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{**THOUGHT, "encrypted_content": "x"}]},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [{**SAID, "content": []}]},
        {"input": [{**CALL, "arguments": None}]},
        {"input": 7},
        {},
    ],
)
def test_what_only_the_engine_knows_is_not_converted(fields: dict[str, Any]) -> None:
    """It is routed without a prefix, and the engine answers."""
    body = {"input": "Hi"} | fields if fields else {}
    with pytest.raises(Unrenderable) as caught:
        CONVERSION.chat(body)
    assert caught.value.reason is UnreadReason.NOT_CONVERTED
