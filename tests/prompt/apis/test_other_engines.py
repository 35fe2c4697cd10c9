"""The conversions of Anthropic's messages by SGLang and TensorRT-LLM, where they differ from vLLM's.

Neither engine runs here. `tests/parity/test_sglang.py` compares with SGLang's own code; what TensorRT-LLM does was
read in its sources. Each pod proves its conversion in its self-test.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.prompt.apis.conversion import Conversion
from router.prompt.apis.sglang_messages import SglangMessages
from router.prompt.apis.trtllm_messages import TrtllmMessages
from router.prompt.conversation import Unrenderable
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED = {"role": "user", "content": "Hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1;"
TOOL = {"name": "look", "input_schema": {"properties": {}}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def result(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(content), **fields}


def call(name: str = "look") -> dict[str, Any]:
    return {"type": "tool_use", "id": "t", "name": name, "input": {"x": 1}}


def chat_of(kind: type[Conversion], tokenizer: Tokenizer, *messages: Any, **fields: Any) -> dict[str, Any]:
    return kind(ChatTemplate(tokenizer, TEMPLATE)).chat({"messages": list(messages), **fields})


@pytest.mark.parametrize(("kind", "joined"), [(SglangMessages, "\n"), (TrtllmMessages, "\n\n")])
def test_system_blocks_are_joined_in_the_engines_way(deepseek: Tokenizer, kind: type[Conversion], joined: str) -> None:
    """Empty ones are dropped."""
    system = [text("A."), text(""), text("B.")]
    (first, *_) = chat_of(kind, deepseek, ASKED, system=system)["messages"]
    assert first == {"role": "system", "content": f"A.{joined}B."}


def test_only_tensorrt_llm_drops_the_billing_block(deepseek: Tokenizer) -> None:
    """The first block, if it is nothing else."""
    system = [text(BILLING), text("A.")]
    (first, *_) = chat_of(SglangMessages, deepseek, ASKED, system=system)["messages"]
    assert first["content"] == f"{BILLING}\nA."
    (first, *_) = chat_of(TrtllmMessages, deepseek, ASKED, system=system)["messages"]
    assert first["content"] == "A."
    (first, *_) = chat_of(TrtllmMessages, deepseek, ASKED, system=[text(BILLING + " Be brief.")])["messages"]
    assert first["content"].endswith("Be brief.")


@pytest.mark.parametrize("kind", [SglangMessages, TrtllmMessages])
def test_text_and_results_keep_their_order(deepseek: Tokenizer, kind: type[Conversion]) -> None:
    """Text in front of a result becomes a message in front of it."""
    said = {"role": "user", "content": [text("a"), result(text("1"), text("2")), text("b")]}
    chat = chat_of(kind, deepseek, said)["messages"]
    assert [message["role"] for message in chat] == ["user", "tool", "user"]


def test_tensorrt_llm_marks_failed_calls_and_joins_leading_system_messages(deepseek: Tokenizer) -> None:
    """Later system messages stay in their places."""
    lead, late = {"role": "system", "content": "S."}, {"role": "system", "content": "L."}
    failed = {"role": "user", "content": [result(text("no"), is_error=True)]}
    assert chat_of(TrtllmMessages, deepseek, lead, ASKED, late, failed)["messages"] == [
        lead,
        ASKED,
        late,
        {"role": "tool", "tool_call_id": "t", "content": "Tool execution failed: no"},
    ]


def test_tensorrt_llm_sets_the_templates_variables(deepseek: Tokenizer) -> None:
    """Thinking and effort; reasoning and calls are in one message."""
    thought = {"type": "thinking", "thinking": "a"}
    chat = chat_of(
        TrtllmMessages,
        deepseek,
        {"role": "assistant", "content": [thought, call()]},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        tools=[TOOL],
    )
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (chat["messages"][0]["reasoning"], chat["messages"][0]["content"]) == ("a", None)
    assert chat["tools"][0]["function"]["parameters"] == TOOL["input_schema"]


def test_sglang_skips_server_tools_and_describes_the_others(deepseek: Tokenizer) -> None:
    """An absent description is empty; without tools of the client there are none."""
    server = {"type": "web_search_20250305", "name": "web_search"}
    (tool,) = chat_of(SglangMessages, deepseek, ASKED, tools=[server, TOOL])["tools"]
    assert tool["function"]["description"] == ""
    assert "tools" not in chat_of(SglangMessages, deepseek, ASKED, tools=[server])
    assert chat_of(SglangMessages, deepseek, ASKED, output_config={"effort": "xhigh"})["reasoning_effort"] == "max"


def test_sglang_parts_references_from_text(deepseek: Tokenizer) -> None:
    """Each run is a tool message of its own."""
    reference = {"type": "tool_reference", "tool_name": "look"}
    said = {"role": "user", "content": [result(text("1"), reference, text("2"))]}
    contents = [message["content"] for message in chat_of(SglangMessages, deepseek, said)["messages"]]
    assert contents == ["1", [{"type": "tool_reference", "name": "look"}], "2"]


@pytest.mark.parametrize(
    ("kind", "message", "fields"),
    [
        (SglangMessages, ASKED, {"thinking": {"type": "disabled"}}),
        (SglangMessages, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}, {}),
        (SglangMessages, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}, {}),
        (TrtllmMessages, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}, {}),
        (TrtllmMessages, {"role": "user", "content": [call()]}, {}),
        (TrtllmMessages, ASKED, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ],
)
def test_what_only_the_pod_knows_is_left_to_it(
    deepseek: Tokenizer, kind: type[Conversion], message: dict[str, Any], fields: dict[str, Any]
) -> None:
    """SGLang writes thinking in the words of a parser that the router does not know."""
    with pytest.raises(Unrenderable):
        chat_of(kind, deepseek, message, **fields)
