"""SGLang's reading of chats, where it differs from vLLM's. Its tokens are compared with SGLang's in `tests/parity`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.apis.sglang_chat import SglangChat, SglangRustChat
from router.prompt.apis.sglang_messages import SglangMessages
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate, detect_sglang_format
from router.prompt.tokenizer import Tokenizer
from router.types import Generation
from tests.kit import scenes

DUMP = "{{ messages | tojson }}{{ tools | tojson }}"
STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
ASKED = {"role": "user", "content": "Hi"}
LOOK = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "look", "extra": 1}}
TURN = {"type": "function", "function": {"name": "turn", "strict": True}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def rendered(tokenizer: Tokenizer, template: str, *messages: Any, **fields: Any) -> str:
    found = ChatTemplate(tokenizer, template)
    return found.render(SglangChat(found).template_body({"messages": list(messages), **fields}))


def tools_of(tokenizer: Tokenizer, **fields: Any) -> Any:
    return json.loads(rendered(tokenizer, "{{ tools | tojson }}", ASKED, tools=[LOOK, TURN], **fields))


def test_tools_keep_the_order_of_their_fields(deepseek: Tokenizer) -> None:
    """Unknown fields are dropped, and absent ones are null, besides two."""
    assert [list(tool["function"].items()) for tool in tools_of(deepseek)] == [
        [("parameters", {"type": "object"}), ("name", "look"), ("description", None)],
        [("name", "turn"), ("strict", True), ("description", None), ("parameters", None)],
    ]
    assert [list(tool) for tool in tools_of(deepseek)] == [["type", "function", "defer_loading"]] * 2


def test_a_choice_of_tools_removes_the_others(deepseek: Tokenizer) -> None:
    assert tools_of(deepseek, tool_choice="none") is None
    assert len(tools_of(deepseek, tool_choice="required")) == 2
    (turn,) = tools_of(deepseek, tool_choice={"type": "function", "function": {"name": "turn"}})
    assert turn["function"]["name"] == "turn"


def test_a_choice_in_a_body_of_the_messages_api_removes_the_others(deepseek: Tokenizer) -> None:
    tools: list[dict[str, Any]] = [{"name": name, "input_schema": {}} for name in ("look", "turn")]
    found = SglangMessages(ChatTemplate(deepseek, DUMP))

    def names(choice: Any) -> list[str]:
        raw = msgspec.Raw(msgspec.json.encode(choice))
        chat = found.chat({"messages": [ASKED], "tools": tools, "tool_choice": raw})
        return [tool["function"]["name"] for tool in chat.get("tools", ())]

    assert names(None) == names({"type": "any"}) == ["look", "turn"]
    assert names({"type": "tool", "name": "turn"}) == ["turn"]
    assert names({"type": "none"}) == []


def test_parts_are_joined_by_spaces_or_kept(deepseek: Tokenizer) -> None:
    """As the template expects them. A text stays a text, and the result of a tool becomes one."""
    said = {"role": "user", "content": [part("a"), part("b ")]}
    result = {"role": "tool", "content": [part("1"), part("2")]}
    assert rendered(deepseek, STRINGS, result, said) == "<tool>1 2<user>a b "
    assert rendered(deepseek, PARTS, {"role": "user", "content": " c "}, result, said) == "<user>c<tool>1 2<user>ab "


def test_the_last_message_of_the_assistant_becomes_one_of_the_user(deepseek: Tokenizer) -> None:
    """Also one that only calls; unless the template receives its parts."""
    answer = {"role": "assistant", "content": [part("One,")]}
    assert rendered(deepseek, STRINGS, answer, ASKED, answer) == "<assistant>One,<user>Hi<user>One,"
    assert rendered(deepseek, PARTS, ASKED, answer) == "<user>Hi<assistant>One,"
    calls = [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]
    assert rendered(deepseek, STRINGS, ASKED, {"role": "assistant", "tool_calls": calls}) == "<user>Hi<user>"


def test_an_effort_switches_thinking_unless_the_client_does(deepseek: Tokenizer) -> None:
    template = "{{ [thinking, enable_thinking, reasoning_effort, documents] | tojson }}"
    assert json.loads(rendered(deepseek, template, ASKED, reasoning_effort="none", documents=[{}])) == [
        *(False, False, "none", None)
    ]
    asked = {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}
    assert json.loads(rendered(deepseek, template, ASKED, **asked)) == [False, True, "low", None]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ({"role": "narrator", "content": "a"}, {}),
        ({"role": "user"}, {}),
        ({"role": "user", "content": [{"type": "file"}]}, {}),
        ({"role": "user", "content": ["a"]}, {}),
        ({"role": "developer", "content": "a", "tools": [LOOK]}, {}),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "[1]"}}]}, {}),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "\ud800"}}]}, {}),
        (ASKED, {"tools": [{"function": {"name": "look", "parameters": {"a": [{"type": ["varchar"]}]}}}]}),
        (ASKED, {"tools": [LOOK], "tool_choice": {"function": {"name": "walk"}}}),
        (ASKED, {"continue_final_message": True}),
        (ASKED, {"reasoning_effort": 0.5}),
        (ASKED, {"reasoning_effort": ["low"]}),
        (ASKED, {"chat_template_kwargs": {"tools": []}}),
    ],
)
def test_what_the_engine_refuses_or_changes_is_not_read(
    deepseek: Tokenizer, message: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(Unrenderable):
        rendered(deepseek, STRINGS, message, **fields)


def test_the_format_is_the_one_that_sglang_detects() -> None:
    """A word is enough, and names count."""
    assert [detect_sglang_format(text) for text in (STRINGS, PARTS, STRINGS + "{# image #}")] == [
        *("string", "openai", "openai")
    ]
    assert detect_sglang_format(PARTS.replace("m.content", "n.content")) == "string"


PLAIN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant"]),
    st.text(st.sampled_from("ab \n<>|"), max_size=6) | st.just("x-anthropic-billing-header: a"),
)


@given(st.lists(PLAIN, min_size=1, max_size=5), st.sampled_from([STRINGS, PARTS]))
def test_chats_that_are_continued_have_the_tokens_of_whole_ones(
    deepseek: Tokenizer, messages: list[dict[str, Any]], template: str
) -> None:
    """Also those that end with the assistant."""
    chat = ChatTemplate(deepseek, template)
    warm = Fingerprinter(deepseek, chat, Generation(model="m"))
    for end in range(1, len(messages) + 1):
        raw = [msgspec.Raw(msgspec.json.encode(message)) for message in messages[:end]]
        request = scenes.request(body=b"", prompt={"messages": raw})
        text = rendered(deepseek, template, *messages[:end])
        found = warm.fingerprint(request, SglangChat)
        assert list(found.tokens) == list(deepseek.encode(text)), text


# --- the server in Rust ---


def in_rust(tokenizer: Tokenizer, template: str, *messages: Any) -> str:
    found = ChatTemplate(tokenizer, template)
    return found.render(SglangRustChat(found).template_body({"messages": list(messages)}))


def test_the_server_in_rust_joins_parts_by_lines(deepseek: Tokenizer) -> None:
    message = {"role": "user", "content": [part("One"), part("Two")]}
    assert (rendered(deepseek, STRINGS, message), in_rust(deepseek, STRINGS, message)) == (
        "<user>One Two",
        "<user>One\nTwo",
    )


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_the_server_in_rust_writes_reasoning_for_a_template_that_does_not(deepseek: Tokenizer, field: str) -> None:
    """In front of the answer, but for the last message, which becomes one of the user."""
    said = {"role": "assistant", "content": "Hi", field: "R"}
    assert in_rust(deepseek, STRINGS, said, ASKED) == "<assistant><think>R</think>Hi<user>Hi"
    assert in_rust(deepseek, STRINGS, {**said, field: ""}, said) == "<assistant>Hi<user>Hi"
    own = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    assert in_rust(deepseek, own, said, ASKED) == "R"


def test_the_server_in_rust_keeps_the_text_of_arguments_for_a_template_that_looks(deepseek: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    shown = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    looks = "{% if messages[0].tool_calls[0].function.arguments is string %}text{% endif %}"
    assert in_rust(deepseek, shown, said, ASKED) == '{"x": 1}'
    assert (in_rust(deepseek, looks, said, ASKED), rendered(deepseek, looks, said, ASKED)) == ("text", "")


@pytest.mark.parametrize("message", [{"role": "user", "content": []}, {"role": "assistant", "content": [part("a")]}])
def test_what_the_server_in_rust_keeps_as_a_list_is_not_read(deepseek: Tokenizer, message: Any) -> None:
    with pytest.raises(Unrenderable):
        in_rust(deepseek, STRINGS, ASKED, message)
