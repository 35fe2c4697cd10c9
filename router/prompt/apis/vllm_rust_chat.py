"""What the Rust front end of vLLM 0.33 makes of a chat (docs/engines.md#the-front-end-in-rust)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from jinja2 import Template

from router.prompt import minijinja
from router.prompt.apis.conversion import Conversion, not_converted
from router.prompt.apis.rust_messages import read_messages, read_tools, refuse
from router.prompt.conversation import BILLING_HEADER, ChatMessage, UnreadReason, Unrenderable, plain_messages
from router.prompt.harmony import ANSWER, CONSTRAIN, EFFORTS, Harmony, HarmonyMessage, SeparateTexts
from router.prompt.sandbox import cut_at_tag, tag_final_message
from router.prompt.serde import as_serde, read_json
from router.prompt.template import ChatTemplate, detect_rust_format

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_TRIED = (
    {"role": "system", "content": " Be\tbrief.\n"},
    {"role": "user", "content": "\n\nHi {'a': \"b\"} "},
    {"role": "assistant", "content": "<b>x</b>\u2028"},
    {"role": "user", "content": "1"},
)
"""Chats are the parts of these: both front ends must render them alike for plain chats to have one reading."""


class RustTemplate:
    """A model's chat template, as the Rust front end renders it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._compiled: Template | None = None
        self._keeps_parts, self._refusal = False, ""
        try:
            given = template.content_format
            self._keeps_parts = (detect_rust_format(template.source) if given == "auto" else given) == "openai"
            self._compiled = minijinja.compile_template(template.source)
        except Exception as error:  # a template may break its compiler in any way
            self._refusal = f"minijinja does not compile the chat template: {error}"

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt of a chat whose messages are decoded. Raises `Unrenderable`."""
        if self._compiled is None:
            raise not_converted(self._refusal)
        messages = read_messages(body["messages"], keeps_parts=self._keeps_parts)
        for call in [call for message in messages for call in message.get("tool_calls", ())]:
            call["function"]["arguments"] = read_json(call["function"]["arguments"])
        tools = read_tools(body, messages)
        if tools and len(self._template.sources) > 1:
            raise not_converted("which of two templates renders chats with tools is not known")
        variables = self._variables(body, messages)
        if tools:
            variables = {"tools": tools, **variables}
        try:
            return _rendered(self._compiled, messages, variables)
        except RecursionError as error:
            raise Unrenderable(UnreadReason.TOO_LONG, str(error)) from error
        except Exception as error:  # a template is code
            raise not_converted(f"the chat template refused the request: {error}") from error

    def _variables(self, body: Mapping[str, Any], messages: Sequence[ChatMessage]) -> dict[str, Any]:
        asked, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        continues, begins = bool(body.get("continue_final_message")), body.get("add_generation_prompt")
        if continues and messages[-1]["role"] != "assistant":
            refuse("a continued message of another role")
        variables = {
            "add_generation_prompt": begins is not False and not continues,
            "continue_final_message": continues,
            **({} if body.get("documents") is None else {"documents": body["documents"]}),
            **self._template.special_tokens,
            **self._template.default_kwargs,
            **asked,
        }
        if effort is not None:
            if not isinstance(effort, str) or effort not in _EFFORTS:
                refuse(f"the reasoning effort {effort!r:.40}")
            variables["reasoning_effort"] = effort
            if "enable_thinking" not in asked:
                variables["enable_thinking"] = effort != "none"
        variables.pop("chat_template", None)
        return variables


def _rendered(template: Template, messages: list[ChatMessage], variables: Mapping[str, Any]) -> str:
    continues = variables["continue_final_message"]
    final_text = tag_final_message(messages[-1], "content", "content") if continues else ""
    text = template.render({"messages": messages, **variables})
    return cut_at_tag(text, final_text) if continues else text


class RustHarmony:
    """gpt-oss's format, as the Rust front end renders it."""

    def __init__(self, harmony: Harmony) -> None:
        self._harmony = harmony

    def render(self, body: Mapping[str, Any]) -> SeparateTexts:
        """The prompt of a chat whose messages are decoded. Raises `Unrenderable`."""
        messages, asked = read_messages(body["messages"], keeps_parts=False), body.get("chat_template_kwargs") or {}
        effort = body.get("reasoning_effort") or asked.get("reasoning_effort")
        if (
            effort not in (None, *EFFORTS)
            or asked.get("enable_thinking") is False
            or body.get("continue_final_message")
        ):
            refuse("an effort, or a continued message, in Harmony")
        all_tools = read_tools(body, messages)
        tools, instructions = all_tools[: len(body.get("tools") or ())], ""
        if messages[0]["role"] in ("system", "developer"):
            first = messages.pop(0)
            instructions, tools = first["content"], tools + first.get("tools", [])
        preamble = self._developer(instructions, tools)
        begins = ANSWER if body.get("add_generation_prompt") is not False else ""
        return self._harmony.assembled(effort, preamble, bool(all_tools), self._harmony_messages(messages), begins)

    def _developer(self, instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
        sections = [f"# Instructions\n\n{self._harmony.plain(instructions)}"] if instructions else []
        try:
            return self._harmony.sections(sections, [tool["function"] for tool in tools], "_: any")
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise not_converted(f"tools that Harmony does not know: {error}") from error

    def _harmony_messages(self, messages: Sequence[ChatMessage]) -> Iterator[HarmonyMessage]:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls}
        for message in messages:
            role, text = message["role"], message["content"]
            if role == "assistant":
                yield from _turn(text, message.get("reasoning"), message.get("tool_calls", ()))
            elif role == "tool":
                if message["tool_call_id"] not in names:
                    refuse("the result of an unknown call")
                yield f"functions.{names[message['tool_call_id']]}<|channel|>commentary to=assistant", [text], "<|end|>"
            elif role == "user":
                yield role, [text], "<|end|>"
            elif role in ("system", "developer"):
                yield "developer", [self._developer(text, message.get("tools", ()))], "<|end|>"
            else:
                raise not_converted(f"the role {role!r:.40} in Harmony")


def _turn(text: str, reasoning: str | None, calls: Sequence[Mapping[str, Any]]) -> Iterator[HarmonyMessage]:
    """The assistant's messages of one turn."""
    if calls and text:
        yield "assistant<|channel|>commentary", [text], "<|end|>"
    if reasoning:
        yield "assistant<|channel|>analysis", [reasoning], "<|end|>"
    for call in calls:
        head = f"assistant<|channel|>commentary to=functions.{call['function']['name']} {CONSTRAIN}"
        yield head, [call["function"]["arguments"]], "<|call|>"
    if text and not calls:
        yield "assistant<|channel|>final", [text], "<|end|>"


class VllmRustChat(Conversion):
    @cached_property
    def template(self) -> Any:
        given = super().template
        return RustHarmony(given) if isinstance(given, Harmony) else RustTemplate(given)

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a chat with their JSON read as serde reads it. Raises `Unrenderable`."""
        if body.get("chat_template") is not None:
            refuse("a chat template in the request")
        try:
            given = {name: as_serde(value) for name, value in body.items() if name != "messages"}
        except (ValueError, RecursionError) as error:
            raise not_converted(f"JSON: {error}") from error
        messages = body["messages"]
        return {**given, "messages": [read_json(one) if isinstance(one, msgspec.Raw) else one for one in messages]}

    def encloses(self, body: Mapping[str, Any]) -> bool:
        return bool(body.get("add_special_tokens"))

    def reads_alike(self, body: Mapping[str, Any]) -> bool:
        messages = body["messages"]
        is_raw = body.keys() == {"messages"} and isinstance(messages[0], msgspec.Raw)
        return is_raw and self.reads_plain(messages) and plain_messages(messages) is not None

    def reads_plain(self, messages: Sequence[msgspec.Raw]) -> bool:
        return self._renders_alike and not any(_may_differ(message) for message in messages)

    @cached_property
    def _renders_alike(self) -> bool:
        """Whether the template renders a plain chat as in Jinja. Harmony may differ in empty messages."""
        given = super().template
        chats = [list(_TRIED[start:end]) for start, end in ((0, 2), (0, 4), (1, 2), (1, 4))]
        return isinstance(given, ChatTemplate) and all(
            _tried(given, chat) == _tried(self.template, chat) for chat in chats
        )


VllmRustChat.in_harmony = VllmRustChat


def _tried(template: ChatTemplate | RustTemplate, messages: list[ChatMessage]) -> str | None:
    try:
        return template.render({"messages": messages})
    except Exception:  # a template is code
        return None


_CONTROLS = tuple(rb"\u00%x" % code for code in range(0x1C, 0x20))


def _may_differ(message: msgspec.Raw) -> bool:
    """Whether a message with a plain role and text may have another prompt here than in Python."""
    raw = bytes(message)
    return BILLING_HEADER.encode() in raw or any(control in raw.lower() for control in _CONTROLS)
