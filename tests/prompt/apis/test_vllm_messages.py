"""vLLM's conversion of Anthropic's messages. Its tokens are compared with a real vLLM's in `tests/parity`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.prompt.apis.vllm_messages import VllmMessages
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

ASKED = {"role": "user", "content": "Hi"}
LATE = [ASKED, {"role": "system", "content": "Be brief."}, ASKED]
IN_FRONT = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}
{{- m.content }}{% endfor %}"""
TOOL = {"name": "look", "input_schema": {"properties": {}}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def conversion(
    deepseek: Tokenizer, template: str = "{% for m in messages %}{{ m.content }}{% endfor %}"
) -> VllmMessages:
    return VllmMessages(ChatTemplate(deepseek, template))


def chat_of(deepseek: Tokenizer, *messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": list(messages), **fields}
    raw: dict[str, Any] = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    raw["messages"] = [msgspec.Raw(msgspec.json.encode(message)) for message in messages]
    found = conversion(deepseek).chat(body)
    assert conversion(deepseek).chat(raw) == found
    return found


def test_system_blocks_are_joined_without_the_billing_block(deepseek: Tokenizer) -> None:
    """Nothing between them. A billing block is dropped whole; an empty system prompt is no message."""
    billing = text("x-anthropic-billing-header: cch=1;\nrest")
    system = [billing, text("A."), text(""), text("B.")]
    assert chat_of(deepseek, ASKED, system=system)["messages"] == [{"role": "system", "content": "A.B."}, ASKED]
    assert chat_of(deepseek, ASKED, system=[billing])["messages"] == [ASKED]
    assert chat_of(deepseek, ASKED, system="")["messages"] == [ASKED]


def test_results_of_tools_precede_the_message_that_they_came_in(deepseek: Tokenizer) -> None:
    """Each as a message of its own, texts joined by newlines. A user message that is then empty is dropped."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("1"), text("2")], "is_error": True}
    tool = {"role": "tool", "tool_call_id": "t", "content": "1\n2"}
    both = {"role": "user", "content": [text("Well?"), result]}
    assert chat_of(deepseek, both)["messages"] == [tool, {"role": "user", "content": "Well?"}]
    assert chat_of(deepseek, {"role": "user", "content": [result]})["messages"] == [tool]
    assert chat_of(deepseek, {"role": "user", "content": []})["messages"] == []


def test_an_assistants_blocks_become_reasoning_text_and_calls(deepseek: Tokenizer) -> None:
    """Redacted thinking vanishes."""
    blocks = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "b"},
        text("Look."),
        {"type": "tool_use", "id": "t", "name": "look", "input": {"x": 1.5}},
    ]
    function = {"name": "look", "arguments": {"x": 1.5}}
    assert chat_of(deepseek, {"role": "assistant", "content": blocks})["messages"] == [
        {
            "role": "assistant",
            "reasoning": "ab",
            "tool_calls": [{"id": "t", "type": "function", "function": function}],
            "content": "Look.",
        }
    ]


def test_late_system_messages_are_merged_only_if_the_template_refuses_them(deepseek: Tokenizer) -> None:
    """In an environment without `raise_exception`, as in the engine."""
    assert conversion(deepseek).chat({"messages": LATE})["messages"] == LATE
    merging = conversion(deepseek, IN_FRONT)
    assert merging.merges_system
    merged = [{"role": "system", "content": "S.Be brief."}, ASKED, ASKED]
    assert merging.chat({"messages": LATE, "system": "S."})["messages"] == merged


@pytest.mark.parametrize(
    ("template", "effort"),
    [
        ("{{ reasoning_effort }}", "none"),
        ("{{ enable_thinking }}", "none"),
        ("always the same", "low"),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}", "low"),
    ],
)
def test_disabled_thinking_is_the_effort_that_the_template_knows(
    deepseek: Tokenizer, template: str, effort: str
) -> None:
    """`low` where `none` is refused or ignored. It wins over the effort of `output_config`."""
    body = {"messages": [ASKED], "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    assert conversion(deepseek, template).chat(body)["reasoning_effort"] == effort
    assert conversion(deepseek, template).chat(body | {"thinking": None})["reasoning_effort"] == "high"


def test_no_tools_are_kept_apart_from_none(deepseek: Tokenizer) -> None:
    """The type of a schema is added last."""
    assert "tools" not in chat_of(deepseek, ASKED)
    assert chat_of(deepseek, ASKED, tools=[])["tools"] == []
    (tool,) = chat_of(deepseek, ASKED, tools=[TOOL])["tools"]
    assert list(tool["function"]["parameters"]) == ["properties", "type"]


def test_blocks_of_system_messages_change_the_tools(deepseek: Tokenizer) -> None:
    """In order: removed, added by value, added by reference, which is then no longer deferred."""

    def after(*changes: dict[str, Any]) -> dict[str, bool | None]:
        said = {"role": "system", "content": list(changes)}
        found = chat_of(deepseek, ASKED, said, tools=[TOOL | {"defer_loading": True}])["tools"]
        return {tool["function"]["name"]: tool["function"]["defer_loading"] for tool in found}

    reference = {"type": "tool_reference", "name": "look"}
    new = {"type": "tool_definition", "definition": TOOL | {"name": "new"}}
    removal = {"type": "tool_removal", "tool": reference}
    assert after(removal) == {}
    assert after({"type": "tool_addition", "tool": reference}) == {"look": None}
    assert after({"type": "tool_addition", "tool": new}) == {"look": True, "new": None}
    assert after(removal, {"type": "tool_addition", "tool": reference}) == {"look": None}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [7]},
        {"messages": [ASKED], "system": 7},
        {"messages": [ASKED], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {}}]}]},
    ],
    ids=["document", "role", "no message", "system", "server tool", "call without id"],
)
def test_what_this_version_does_not_know_is_left_to_the_engine(deepseek: Tokenizer, body: dict[str, Any]) -> None:
    """It is routed without a prefix, never refused."""
    with pytest.raises(Unrenderable) as caught:
        conversion(deepseek).chat(body)
    assert caught.value.reason is UnreadReason.NOT_CONVERTED
