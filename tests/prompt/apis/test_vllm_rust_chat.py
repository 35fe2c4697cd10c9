"""The rules of the Rust front end of vLLM, one by one. All of its recorded prompts are compared in `tests/parity`."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import msgspec
import pytest

from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Generation
from tests.kit import scenes

DUMP = "{{ messages | tojson }}{{ tools is defined }}"
STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HI = {"role": "user", "content": "Hi"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "One", "cache_control": {}}, {"type": "text", "text": "Two"}],
}
LOOK = {"type": "function", "function": {"name": "look"}}
WRITTEN = {"type": "function", "function": {"name": "look", "description": None, "parameters": None}}


def rendered(tokenizer: Tokenizer, template: str, *messages: Any, **fields: Any) -> str:
    conversion = VllmRustChat(ChatTemplate(tokenizer, template))
    raw = [msgspec.Raw(msgspec.json.encode(message)) for message in messages]
    return str(conversion.template.render(conversion.template_body({"messages": raw, **fields})))


def messages_of(tokenizer: Tokenizer, *messages: Any) -> Any:
    return json.loads(rendered(tokenizer, "{{ messages | tojson }}", *messages))


def calling(arguments: str) -> dict[str, Any]:
    function = {"arguments": arguments, "name": "look"}
    return {"tool_calls": [{"type": "function", "function": function, "id": "c1"}], "role": "assistant"}


def test_text_parts_are_joined_with_nothing(deepseek: Tokenizer) -> None:
    assert rendered(deepseek, STRINGS, PARTS) == "<user>OneTwo"


def test_a_template_that_takes_lists_gets_parts_without_other_fields(deepseek: Tokenizer) -> None:
    lists = "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}"
    assert rendered(deepseek, lists, PARTS) == '{"type": "text", "text": "One"}{"type": "text", "text": "Two"}'


def test_a_developer_stays_and_its_tools_are_tools_of_the_request(deepseek: Tokenizer) -> None:
    developer = {"role": "developer", "content": "D", "tools": [LOOK]}
    text = rendered(deepseek, "{{ messages[0].role }}{{ tools | tojson }}", developer, HI)
    assert text == f"developer{json.dumps([WRITTEN])}"


def test_a_billing_line_stays(deepseek: Tokenizer) -> None:
    line = "x-anthropic-billing-header: cch=1;\nYou are A."
    assert rendered(deepseek, STRINGS, {"role": "system", "content": line}) == f"<system>{line}"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_three_names_and_an_empty_one_is_none(deepseek: Tokenizer, field: str) -> None:
    (said, silent) = messages_of(
        deepseek,
        {"role": "assistant", "content": "x", field: "t", "name": "n"},
        {"role": "assistant", "content": "x", field: ""},
    )
    assert list(said.items()) == [
        ("role", "assistant"),
        ("content", "x"),
        ("reasoning", "t"),
        ("reasoning_content", "t"),
    ]
    assert silent == {"role": "assistant", "content": "x"}


def test_a_call_is_written_in_its_own_order(deepseek: Tokenizer) -> None:
    (message,) = messages_of(deepseek, calling('{"b": 1, "a": 2}'))
    (call,) = message["tool_calls"]
    assert [list(call), list(call["function"])] == [["id", "type", "function"], ["name", "arguments"]]
    assert list(call["function"]["arguments"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("sent", "printed"),
    [
        ("1e-07", "1e-7"),
        ("0.00001", "0.00001"),
        ("1e16", "1e+16"),
        ("-0", "-0.0"),
        ("18446744073709551616", "1.8446744073709552e+19"),
        ("123456789.12345679", "123456789.1234568"),
        ("9007199254740993.0", "9007199254740994.0"),
    ],
)
def test_numbers_are_those_of_serde(deepseek: Tokenizer, sent: str, printed: str) -> None:
    text = rendered(deepseek, DUMP, calling(f'{{"x": {sent}, "y": "1e-07"}}'))
    assert f'{{"x": {printed}, "y": "1e-07"}}' in text


def test_marks_are_escaped_inside_values(deepseek: Tokenizer) -> None:
    """Also vowels of Bengali and Tamil, which Python does not count as marks of no width."""
    asked = {"x": "\u0995\u09be \u0b95\u0bbe e\u0301"}
    text = rendered(deepseek, "{{ [x] }}{{ x }}", HI, chat_template_kwargs=asked)
    assert text == '["\u0995\\u{9be} \u0b95\\u{bbe} e\\u{301}"]' + asked["x"]


def test_words_begin_after_space_and_punctuation_of_ascii(deepseek: Tokenizer) -> None:
    """In Python also after a digit. Their first letter is a capital, where Python has one of its own for titles."""
    template = "{{ \"it's THE 2nd-day\" | title }}|{{ 'ΑΣ ßa' | title }}|{{ 'ßA' | capitalize }}|{{ '2nd'.title() }}"
    assert rendered(deepseek, template, HI) == "It'S The 2nd-Day|Ασ SSa|SSa|2Nd"


@pytest.mark.parametrize(
    ("expression", "printed"),
    [
        ("''.isspace() and ''.isdigit() and ''.islower()", "True"),
        ("'ab ab'.islower()", "False"),
        ("'12'.isnumeric() and ' '.isspace()", "True"),
        ("'A1'.isupper()", "False"),
        ("'a\\nb\\r\\n' | indent(1) ~ '.'", "a\n b."),
        ("'a\\n\\nb' | indent(2, true)", "  a\n\n  b"),
    ],
)
def test_texts_have_the_methods_of_minijinja(deepseek: Tokenizer, expression: str, printed: str) -> None:
    """It asks each character, and indents without the last end of line."""
    assert rendered(deepseek, f"{{{{ {expression} }}}}", HI) == printed


def test_absent_tools_are_undefined(deepseek: Tokenizer) -> None:
    assert rendered(deepseek, "{{ tools is defined }}{{ documents is defined }}", HI) == "FalseFalse"


def test_a_method_that_is_not_called_is_undefined(deepseek: Tokenizer) -> None:
    """So a field that a text could not have, such as the title of a document, is not one of its methods."""
    template = "{{ d.title is defined }}{{ d['title'] }}{{ [1].index }}{{ {'a': 1}.items }}{{ d.strip() }}"
    assert rendered(deepseek, "{% set d = ' x ' %}" + template, HI) == "Falsex"


def test_variables_of_the_request_override_all_others(deepseek: Tokenizer) -> None:
    asked = {"add_generation_prompt": False, "tools": "T", "x": None}
    text = rendered(deepseek, "{{ add_generation_prompt }}{{ tools }}{{ x }}", HI, chat_template_kwargs=asked)
    assert text == "FalseTNone"


def test_a_message_is_continued_without_more(deepseek: Tokenizer) -> None:
    last = {"role": "assistant", "content": "The capital of"}
    text = rendered(deepseek, STRINGS + "!{{ continue_final_message }}", HI, last, continue_final_message=True)
    assert text == "<user>Hi<assistant>The capital of"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "x", "reasoning": "a", "thinking": "a"},
        {"role": "tool", "content": "x"},
        calling("{bad"),
        calling('{"x": 1e400}'),
        {"role": "developer", "content": "x", "tools": 5},
    ],
)
def test_a_chat_that_it_refuses_is_not_read(deepseek: Tokenizer, message: Any) -> None:
    with pytest.raises(Unrenderable) as error:
        rendered(deepseek, DUMP, HI, message)
    assert error.value.reason is UnreadReason.NOT_CONVERTED


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{**LOOK, "x": float("inf")}]},
        {"documents": [10**400]},
        {"reasoning_effort": ["low"]},
    ],
)
def test_fields_that_serde_refuses_are_not_read(deepseek: Tokenizer, fields: dict[str, Any]) -> None:
    """Such as 1e400, which other JSON readers take for infinity."""
    with pytest.raises(Unrenderable):
        rendered(deepseek, DUMP, HI, **fields)


def test_fields_that_are_nested_too_deeply_are_not_read(deepseek: Tokenizer) -> None:
    nested = reduce(lambda inner, _: [inner], range(5000), list[Any]())
    with pytest.raises(Unrenderable):
        rendered(deepseek, DUMP, HI, chat_template_kwargs={"x": nested})


def test_special_tokens_are_put_around_a_chat_that_asks_for_them(deepseek: Tokenizer) -> None:
    fingerprinter = Fingerprinter(deepseek, ChatTemplate(deepseek, STRINGS), Generation(model="tiny"))

    def is_framed(**fields: Any) -> bool:
        body = {"messages": [HI], **fields}
        request = scenes.request(model="tiny", body=b"", prompt=body)
        return fingerprinter.begin(request, VllmRustChat).framed

    assert is_framed(add_special_tokens=True) and not is_framed()


def test_plain_chats_are_read_as_in_python_unless_a_text_may_differ(deepseek: Tokenizer) -> None:
    conversion = VllmRustChat(ChatTemplate(deepseek, STRINGS))

    def reads(content: str) -> bool:
        return conversion.reads_plain([msgspec.Raw(msgspec.json.encode({"role": "system", "content": content}))])

    assert reads("Be brief.")
    assert not reads("x-anthropic-billing-header: a\nb") and not reads("a\x1c")
    assert not VllmRustChat(ChatTemplate(deepseek, "{{ messages }}")).reads_plain([])
