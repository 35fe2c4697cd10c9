"""The messages that a template receives."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from router.errors import MalformedRequest
from router.prompt.conversation import (
    MAX_ARGUMENTS_CHARACTERS,
    UnreadReason,
    Unrenderable,
    normal_messages,
    with_decoded_messages,
    without_developer,
)

TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def one(message: Any, content_format: Any = "string") -> Any:
    return normal_messages([message], content_format)[0]


def test_content_is_a_string_or_a_list_of_parts_as_the_template_expects() -> None:
    """For both forms in the request."""
    for content in ("a\nb", TWO_PARTS, ["a", "b"], ["a", "", *TWO_PARTS[1:]]):
        assert one({"role": "user", "content": content}) == {"role": "user", "content": "a\nb"}
    assert one({"role": "user", "content": "a"}, "openai")["content"] == [{"type": "text", "text": "a"}]
    assert one({"role": "user", "content": TWO_PARTS}, "openai")["content"] == TWO_PARTS


@pytest.mark.parametrize("content", [None, [], [{"type": "text", "text": None}], [{"type": "refusal"}]])
def test_absent_content_is_empty(content: Any) -> None:
    """Empty parts are skipped."""
    assert one({"role": "assistant", "content": content}) == {"role": "assistant", "content": ""}
    assert one({"role": "assistant", "content": content}, "openai")["content"] == []
    assert one({"role": "assistant"})["content"] == ""


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "x"},
        {"type": "output_text", "text": "x"},
        {"type": "refusal", "refusal": "x"},
        {"type": "thinking", "thinking": "x", "closed": True},
    ],
)
def test_every_type_of_text_is_text(part: dict[str, Any]) -> None:
    assert one({"role": "user", "content": [part]})["content"] == "x"
    assert one({"role": "user", "content": [part]}, "openai")["content"] == [{"type": "text", "text": "x"}]


def test_fields_of_a_part_that_engines_do_not_know_reach_the_template_in_order() -> None:
    """Only as parts; a string has no fields."""
    part = {"z": 1, "type": "text", "text": "x", "a": 2}
    seen = one({"role": "user", "content": [part]}, "openai")["content"][0]
    assert list(seen.items()) == [("type", "text"), ("text", "x"), ("z", 1), ("a", 2)]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:..."}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
        {"type": "of_the_future"},
        {"image_url": "http://x"},
        {"type": "text", "text": "a", "image_url": "http://x", "uuid": "b"},
    ],
)
def test_media_cannot_be_rendered_here(part: dict[str, Any]) -> None:
    """The request is routed without a prefix."""
    with pytest.raises(Unrenderable, match=r"messages\[0\]\.content") as caught:
        one({"role": "user", "content": ["look", part]})
    assert caught.value.reason is UnreadReason.MEDIA


def test_the_details_of_a_part_are_short() -> None:
    """Clients choose its type."""
    with pytest.raises(Unrenderable) as caught:
        one({"role": "user", "content": [{"type": "x" * 10_000}]})
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": ["user"]}], "messages[0].role"),
        ([{"role": "user"}, {"role": "user", "content": 1}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [1]}], "messages[0].content"),
        ([{"role": "user", "content": [{}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "thinking"}]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls"),
    ],
)
def test_invalid_messages_are_refused_with_their_field(messages: Any, param: str) -> None:
    """The error names field and place."""
    with pytest.raises(MalformedRequest) as caught:
        normal_messages(messages, "string")
    assert caught.value.param == param
    assert param in str(caught.value)


def test_the_billing_line_that_changes_on_every_request_is_dropped() -> None:
    """From system messages only; a part that becomes empty is dropped too."""
    header = "x-anthropic-billing-header: cc_version=2; cch=1f"
    kept = [f"{header}\nYou are", {"type": "text", "text": f"{header}\nhelpful."}, header]
    assert one({"role": "system", "content": kept})["content"] == "You are\nhelpful."
    assert one({"role": "system", "content": header})["content"] == ""
    assert one({"role": "system", "content": f"a\n{header}\nb"})["content"] == f"a\n{header}\nb"
    assert one({"role": "user", "content": f"{header}\nb"})["content"] == f"{header}\nb"


def test_the_role_is_the_first_field_also_of_a_plain_message() -> None:
    """A template may print a message as JSON, and some clients sort their fields."""
    (message,) = normal_messages([{"content": "Hi", "role": "user"}], "string")
    assert [*message] == ["role", "content"]


def test_reasoning_has_both_names() -> None:
    """The newer one takes precedence; only assistant messages have it."""
    both = {"reasoning": "r", "reasoning_content": "r"}
    for sent in (
        {"reasoning": "r"},
        {"reasoning_content": "r"},
        {"reasoning": "r", "reasoning_content": "old"},
    ):
        assert one({"role": "assistant", "content": "x", **sent}) == {
            "role": "assistant",
            "content": "x",
            **both,
        }
    assert one({"role": "user", "content": "x", **both}) == {"role": "user", "content": "x"}


def test_tool_calls_are_kept_and_an_empty_list_of_them_is_dropped() -> None:
    """For templates, the presence of the field means a tool call."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    seen = one({"role": "assistant", "content": None, "tool_calls": [call]})
    assert seen["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert "tool_calls" not in one({"role": "assistant", "content": "x", "tool_calls": []})
    assert "tool_calls" not in one({"role": "assistant", "content": "x", "tool_calls": None})
    assert "tool_calls" not in one({"role": "user", "content": "x", "tool_calls": [call]})


def test_a_tool_result_is_one_string_for_every_template() -> None:
    """Unless it refers to tools, which needs a list of parts."""
    answer = {"role": "tool", "tool_call_id": "1", "name": "f", "content": TWO_PARTS}
    expected = {"role": "tool", "content": "a\nb", "tool_call_id": "1", "name": "f"}
    assert one(answer, "openai") == one(answer, "string") == expected
    reference = {"type": "tool_reference", "name": "g"}
    mixed = {"role": "tool", "content": [*TWO_PARTS, reference]}
    assert one(mixed, "openai")["content"] == [*TWO_PARTS, reference]
    assert one(mixed, "string")["content"] == "a\nb\ng"
    assert one({"role": "tool"}, "openai") == {"role": "tool", "content": ""}


def test_names_and_tasks_are_kept_when_they_are_strings() -> None:
    """Other fields of a message do not reach the template."""
    message = {"role": "user", "content": "x", "name": "ann", "task": "t", "metadata": 1}
    assert one(message) == {"role": "user", "content": "x", "name": "ann", "task": "t"}
    assert one({"role": "user", "content": "x", "name": 1}) == {"role": "user", "content": "x"}


def test_the_request_does_not_change() -> None:
    """It is forwarded and may be rendered again."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": ["x-anthropic-billing-header: 1\nx"]},
        {"role": "assistant", "content": TWO_PARTS, "tool_calls": [call], "reasoning_content": "r"},
    ]
    before = copy.deepcopy(messages)
    normal_messages(messages, "openai")
    assert messages == before


def test_developers_become_system_and_are_merged_in_front() -> None:
    """In order, without empty ones, as one string in both formats."""
    conversation = normal_messages(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "developer", "content": TWO_PARTS, "tools": []},
            {"role": "system", "content": ""},
        ],
        "openai",
    )
    merged = without_developer(conversation)
    assert merged[0] == {"role": "system", "content": "s\n\na\nb"}
    assert [message["role"] for message in merged] == ["system", "user"]


def test_a_lone_first_developer_is_only_renamed() -> None:
    """Its content keeps its form and its tools are dropped. Without a developer message nothing changes."""
    lone: Any = [{"role": "developer", "content": TWO_PARTS, "tools": None}, {"role": "user", "content": "u"}]
    assert without_developer(lone)[0] == {"role": "system", "content": TWO_PARTS}
    late: Any = [{"role": "user", "content": "u"}, {"role": "system", "content": "s"}]
    assert without_developer(late) is late


def test_a_call_with_long_arguments_is_not_decoded() -> None:
    """Half a million objects in a string would hold the interpreter for a quarter of a second."""
    for size, fits in ((MAX_ARGUMENTS_CHARACTERS, True), (MAX_ARGUMENTS_CHARACTERS + 1, False)):
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'.ljust(size)}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        if fits:
            (seen,) = normal_messages(messages, "string")
            assert seen["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        else:
            with pytest.raises(Unrenderable, match=f"{size} characters") as caught:
                normal_messages(messages, "string")
            assert caught.value.reason == UnreadReason.TOO_LONG


def test_a_long_float_in_a_message_is_refused() -> None:
    """One takes up to 25 us."""
    message = b'{"role":"user","content":"x","y":[%b]}'
    short = msgspec.Raw(message % b"1.0123456789012345e-300")
    assert with_decoded_messages({"messages": [short]})["messages"][0]["y"] == [1.0123456789012345e-300]
    with pytest.raises(MalformedRequest, match="it has a number of 107 characters"):
        with_decoded_messages({"messages": [msgspec.Raw(message % (b"1." + b"0" * 100 + b"e-300"))]})
