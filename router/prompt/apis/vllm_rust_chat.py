"""What the Rust front end of vLLM 0.33 makes of a chat with a template (docs/engines.md#the-front-end-in-rust)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import msgspec

from router.prompt import minijinja
from router.prompt.apis.conversion import Conversion, not_converted
from router.prompt.apis.rust_messages import decoded, read_messages, read_tools, refuse
from router.prompt.apis.vllm_rust_harmony import VllmRustHarmony
from router.prompt.conversation import BILLING_HEADER, ChatMessage, UnreadReason, Unrenderable, plain_messages
from router.prompt.sandbox import cut_at_tag, tag_final_message
from router.prompt.serde import read_json
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

    pictures = None

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._text = template.source
        try:
            self._compiled = minijinja.compile_template(self._text)
            detected = detect_rust_format(self._text)
        except Exception as error:  # a template may break its compiler in any way
            raise not_converted(f"minijinja does not compile the chat template: {error}") from error
        self._keeps_parts = (detected if template.content_format == "auto" else template.content_format) == "openai"

    def render(self, body: Mapping[str, Any], *, keeps_empty_tools: bool = False) -> str:
        """The prompt of a chat whose messages are decoded. Raises `Unrenderable`."""
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
            return self._rendered(messages, variables)
        except RecursionError as error:
            raise Unrenderable(UnreadReason.TOO_LONG, str(error)) from error
        except Exception as error:  # a template is code
            raise not_converted(f"the chat template refused the request: {error}") from error

    def render_media(self, body: Mapping[str, Any], **_: Any) -> NoReturn:
        raise Unrenderable(UnreadReason.MEDIA, "how this front end reads pictures is not known")

    def _rendered(self, messages: list[ChatMessage], variables: Mapping[str, Any]) -> str:
        if not variables["continue_final_message"]:
            return minijinja.render(self._compiled, messages, variables)
        final_text = tag_final_message(messages[-1], "content", "content")
        return cut_at_tag(minijinja.render(self._compiled, messages, variables), final_text)

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


class VllmRustChat(Conversion):
    in_harmony = VllmRustHarmony

    @cached_property
    def template(self) -> Any:
        given = super().template
        assert isinstance(given, ChatTemplate)
        return RustTemplate(given)

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return decoded(body)

    def encloses(self, body: Mapping[str, Any]) -> bool:
        return bool(body.get("add_special_tokens"))

    def reads_alike(self, body: Mapping[str, Any]) -> bool:
        messages = body["messages"]
        is_raw = body.keys() == {"messages"} and isinstance(messages[0], msgspec.Raw)
        return is_raw and plain_messages(messages) is not None and self.reads_plain(messages)

    def reads_plain(self, messages: Sequence[msgspec.Raw]) -> bool:
        return self._reads_alike and not any(_may_differ(message) for message in messages)

    @cached_property
    def _reads_alike(self) -> bool:
        """Whether the template renders a plain chat as in Jinja."""
        given = Conversion(self._template).template
        chats = [list(_TRIED[start:end]) for start, end in ((0, 2), (0, 4), (1, 2), (1, 4))]
        return all(_rendered(given, chat) == _rendered(self.template, chat) for chat in chats)


def _rendered(template: Any, messages: Sequence[Any]) -> str | None:
    try:
        return str(template.render({"messages": list(messages)}))
    except Exception:  # a template is code
        return None


_CONTROLS = tuple(rb"\u00%x" % code for code in range(0x1C, 0x20))


def _may_differ(message: msgspec.Raw) -> bool:
    """Whether a message with a plain role and text may have another prompt here than in Python."""
    raw = bytes(message)
    return BILLING_HEADER.encode() in raw or any(control in raw.lower() for control in _CONTROLS)
