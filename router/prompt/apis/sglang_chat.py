"""What SGLang 0.5.23 makes of a chat: `openai/serving_chat.py`, `openai/protocol.py`, `parser/jinja_template_utils.py`.

Its messages reach the template almost as the client wrote them. A last message of the assistant becomes one of the
user. Documents, `add_generation_prompt` and `add_special_tokens` are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from router.prompt.apis.conversion import Conversion, Decoder, not_converted
from router.prompt.conversation import (
    MAX_ARGUMENTS_CHARACTERS,
    ChatMessage,
    TemplateMessages,
    UnreadReason,
    Unrenderable,
    argument_characters,
    plain_messages,
    reasoning_of,
    with_decoded_messages,
)
from router.prompt.media import media_parts
from router.prompt.template import detect_sglang_format

_ROLES = frozenset({"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"})
_OPTIONAL = ("tool_call_id", "name", "reasoning_content")
_OF_PARSERS = ("phase", "tools", "prefix")
"""Fields of messages that only some models' encoders read."""
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_TEXTS = ("text", "input_text")
_THOUGHTS = ("thinking", "reasoning")
_ARGUMENTS = Decoder.of(dict[str, Any])


class SglangChat(Conversion):
    _between = " "
    """What is between the texts of parts."""

    @cached_property
    def _keeps_parts(self) -> bool:
        """Whether templates receive the parts of a message as a list."""
        return detect_sglang_format(self.template.source) == "openai"

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body, with an effort that switches thinking on or off."""
        effort, variables = body.get("reasoning_effort"), body.get("chat_template_kwargs") or {}
        if effort is not None:
            if not isinstance(effort, str) or effort not in _EFFORTS:
                raise not_converted(f"the reasoning effort {effort!r:.40}")
            thinks = effort != "none"
            variables = {"thinking": thinks, "enable_thinking": thinks, **variables}
        return {**with_decoded_messages(body), "chat_template_kwargs": variables}

    def template_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        chat = self.chat(body)
        asked = chat.get("chat_template_kwargs") or {}
        if asked.keys() & {"tools", "add_generation_prompt", "continue_final_message"}:
            raise not_converted("variables of the template that the engine sets")
        if chat.get("continue_final_message"):
            raise not_converted("the continued message is encoded by itself")
        variables = {"reasoning_effort": chat.get("reasoning_effort"), **asked, "tools": _tools(chat)}
        return {"messages": self._rewritten(chat["messages"]), "chat_template_kwargs": variables}

    def reads_plain(self, messages: Sequence[msgspec.Raw]) -> bool:
        last = plain_messages(messages[-1:])
        return not self._keeps_parts and last is not None and last[0].role != "assistant"

    def _rewritten(self, given: list[Any]) -> list[ChatMessage]:
        """The messages for the template; those with pictures as they are."""
        shown = [bool(media_parts([message])) for message in given]
        messages = [
            message if has_media else self._message(message) for message, has_media in zip(given, shown, strict=True)
        ]
        if messages and messages[-1].get("role") == "assistant" and isinstance(messages[-1].get("content"), str):
            messages[-1] = {"role": "user", "content": messages[-1]["content"]}
        return messages if any(shown) else TemplateMessages(messages)

    def _message(self, message: Any) -> ChatMessage:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user" and message.get("content") is not None:
            return {"role": role, "content": self._content(role, message["content"])}
        role = role.lower() if isinstance(role, str) else None
        if role not in _ROLES or any(message.get(name) is not None for name in _OF_PARSERS):
            raise not_converted(f"a message of the role {role!r:.40}")
        found = {"role": role, "content": self._content(role, message.get("content"))}
        found |= {name: message[name] for name in _OPTIONAL if message.get(name) is not None}
        calls = message.get("tool_calls")
        if calls is not None:
            if role != "assistant" or not isinstance(calls, list):
                raise not_converted(f"tool_calls in a message of the role {role!r}")
            found["tool_calls"] = [_call(call) for call in calls]
        return found

    def _content(self, role: str, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise not_converted("a content that is neither text nor parts")
        parts = [part for given in content if (part := _part(given))]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        if self._keeps_parts and not (role == "tool" and len(texts) == len(content)):
            return parts
        return self._between.join(texts)


class SglangRustChat(SglangChat):
    """The same by its server in Rust (docs/engines.md#the-server-of-sglang-in-rust)."""

    _between = "\n"

    def _message(self, message: Any) -> ChatMessage:
        if isinstance(message, dict) and message.get("reasoning") is not None:
            message = {**message, "reasoning_content": reasoning_of(message)}
        found = super()._message(message)
        if "arguments is string" in self.template.source:
            for call, given in zip(found.get("tool_calls", ()), message.get("tool_calls") or (), strict=True):
                call["function"]["arguments"] = given["function"].get("arguments")
        if "reasoning_content" not in self.template.source and (reasoning := found.pop("reasoning_content", "")):
            found["content"] = f"<think>{reasoning}</think>{found['content']}"
        return found

    def _content(self, role: str, content: Any) -> Any:
        if content == []:
            raise not_converted("an empty list of parts, which the server in Rust keeps")
        return super()._content(role, content)

    def _rewritten(self, given: list[Any]) -> list[ChatMessage]:
        *earlier, last = given
        if last.get("role") == "assistant":
            last = {"role": "user", "content": last.get("content")}
            if not isinstance(last["content"], str):
                raise not_converted("a last message of the assistant without a text")
        return super()._rewritten([*earlier, last])


def _part(part: Any) -> dict[str, Any] | None:
    """A part for the template; None for thinking, which is dropped."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    if kind not in _THOUGHTS:
        raise not_converted(f"a part of type {kind!r:.40}")
    return None


def _call(call: Any) -> dict[str, Any]:
    """A call as the engine writes it back, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise not_converted("a tool call that is not one of a function")
    if (characters := argument_characters(call)) > MAX_ARGUMENTS_CHARACTERS:
        raise Unrenderable(UnreadReason.TOO_LONG, f"a tool call of {characters} characters")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _ARGUMENTS.read(msgspec.Raw(arguments.encode("utf-8", "surrogatepass")), "arguments")
    written = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": written}


def _tools(chat: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools as the engine writes them back: those that may be called."""
    tools, choice = chat.get("tools"), chat.get("tool_choice")
    if not tools or choice == "none":
        return None
    written = [_tool(tool) for tool in tools]
    if choice is None or isinstance(choice, str):
        return written
    function = choice.get("function") if isinstance(choice, dict) else None
    named = function.get("name") if isinstance(function, dict) else None
    found = [tool for tool in written if tool["function"]["name"] == named]
    if not found:
        raise not_converted(f"tool_choice names {named!r:.40}, which is no tool")
    return found


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise not_converted("a tool without a function that has a name")
    _check_types(function.get("parameters"))
    deferred = tool.get("defer_loading")
    given = function if function.get("defer_loading") is not None else {**function, "defer_loading": deferred}
    names = [name for name in (*function, *_FUNCTION_FIELDS) if name in _FUNCTION_FIELDS]
    written = {
        name: given.get(name)
        for name in names
        if given.get(name) is not None or name not in ("strict", "defer_loading")
    }
    return {"type": tool.get("type", "function"), "function": written, "defer_loading": deferred}


def _check_types(schema: Any) -> None:
    """Raises `Unrenderable` where the engine renames a type, such as `varchar`."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            kinds = value.get("type")
            listed = kinds if isinstance(kinds, list) else [kinds]
            if any(isinstance(kind, str) and kind not in _SCHEMA_TYPES for kind in listed):
                raise not_converted("parameters of a tool with a type that the engine renames")
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
