"""SGLang's conversion of Anthropic's messages, where it differs from vLLM's.

The engine does not run here: `tests/parity/test_sglang.py` compares with its own code.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.prompt.apis.sglang_messages import SglangMessages
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


def chat_of(tokenizer: Tokenizer, *messages: Any, **fields: Any) -> dict[str, Any]:
    return SglangMessages(ChatTemplate(tokenizer, TEMPLATE)).chat({"messages": list(messages), **fields})


def test_system_blocks_are_joined_by_lines(deepseek: Tokenizer) -> None:
    """Empty ones are dropped. The billing block is kept."""
    system = [text(BILLING), text(""), text("A.")]
    (first, *_) = chat_of(deepseek, ASKED, system=system)["messages"]
    assert first == {"role": "system", "content": f"{BILLING}\nA."}


def test_text_and_results_keep_their_order(deepseek: Tokenizer) -> None:
    """Text in front of a result becomes a message in front of it."""
    said = {"role": "user", "content": [text("a"), result(text("1"), text("2")), text("b")]}
    chat = chat_of(deepseek, said)["messages"]
    assert [message["role"] for message in chat] == ["user", "tool", "user"]


def test_sglang_skips_server_tools_and_describes_the_others(deepseek: Tokenizer) -> None:
    """An absent description is empty; without tools of the client there are none."""
    server = {"type": "web_search_20250305", "name": "web_search"}
    (tool,) = chat_of(deepseek, ASKED, tools=[server, TOOL])["tools"]
    assert tool["function"]["description"] == ""
    assert "tools" not in chat_of(deepseek, ASKED, tools=[server])
    assert chat_of(deepseek, ASKED, output_config={"effort": "xhigh"})["reasoning_effort"] == "max"


def test_sglang_parts_references_from_text(deepseek: Tokenizer) -> None:
    """Each run is a tool message of its own."""
    reference = {"type": "tool_reference", "tool_name": "look"}
    said = {"role": "user", "content": [result(text("1"), reference, text("2"))]}
    contents = [message["content"] for message in chat_of(deepseek, said)["messages"]]
    assert contents == ["1", [{"type": "tool_reference", "name": "look"}], "2"]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (ASKED, {"thinking": {"type": "disabled"}}),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}, {}),
        ({"role": "assistant", "content": [{"type": "redacted_thinking"}]}, {}),
    ],
)
def test_what_only_the_pod_knows_is_left_to_it(
    deepseek: Tokenizer, message: dict[str, Any], fields: dict[str, Any]
) -> None:
    """SGLang writes thinking in the words of a parser that the router does not know."""
    with pytest.raises(Unrenderable):
        chat_of(deepseek, message, **fields)
