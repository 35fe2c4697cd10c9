"""Rewrites a request's messages into the form that chat templates receive.

This is what vLLM 0.32 does between the HTTP body and the template (`renderers/chat_utils.py`,
`entrypoints/openai/chat_completion/protocol.py`), for text. Bodies that every engine refuses are refused here; those
that only some refuse are left to the engine. The request itself does not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec

from router.errors import DECODE_ERRORS, MalformedRequest, not_json
from router.guards import short_float

ChatMessage = dict[str, Any]
ContentFormat = Literal["string", "openai"]

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""The field that holds the text, by type of content part."""

_MAY_BE_NULL = ("text", "refusal")
_MEDIA_FIELDS = frozenset(
    {"uuid", "data", "file", "image_url", "image_pil", "image_embeds", "audio_url", "audio_embeds"}
    | {"input_audio", "video_url", "video_embeds", "prompt_embeds"}
)
"""Fields that mark a content part without a type as media."""
_PART_FIELDS = _MEDIA_FIELDS | {"type", "text", "refusal", "thinking", "closed", "name"}
"""Fields of content parts that are rewritten or dropped; all others reach the template."""

_ANY = msgspec.json.Decoder(float_hook=short_float)
_PLAIN_FIELDS = ["role", "content"]
_PLAIN_ROLES = ("system", "user", "assistant")
MAX_ARGUMENTS_CHARACTERS = 256 * 1024
"""Maximum length of a tool call. Twice as many would hold the interpreter for 20 ms, in any thread."""
BILLING_HEADER = "x-anthropic-billing-header"
"""Start of a line that Claude Code puts first in its system prompt and changes on every request."""


class MediaPart(dict[str, Any]):
    """A content part that is not text, as templates receive it: `media.py` puts it in place of the request's."""


class TemplateMessages(list[ChatMessage]):
    """Messages as the template receives them: a conversion has rewritten them."""


class UnreadReason(StrEnum):
    """Why a request is routed without a prefix: a label of metrics."""

    MEDIA = "media"
    REWRITTEN = "rewritten_by_engine"
    NOT_CONVERTED = "not_converted"
    """How the engine converts this body to a chat is not known."""
    NO_TEMPLATE = "no_chat_template"
    NO_PREFIX = "endpoint_without_prefix"
    NOT_TOKENIZED = "not_tokenized_by_pods"
    """The tokenizer is `engine`, and no pod answered."""
    TOO_LONG = "too_long"
    """It almost certainly fits no pod."""
    NO_TOKENIZER = "no_tokenizer"
    BUSY = "too_many_long_prompts"
    """No thread read it in time."""


class Unrenderable(Exception):
    """The prompt's tokens cannot be computed here: route the request without a prefix. `message` has the details."""

    def __init__(self, reason: UnreadReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def normal_messages(messages: Any, content_format: ContentFormat) -> list[ChatMessage]:
    """The body's `messages` as the template receives them. Raises `MalformedRequest`, or `Unrenderable` for media."""
    if isinstance(messages, TemplateMessages):
        return messages
    if not isinstance(messages, list) or not messages:
        raise MalformedRequest("messages must be a list with at least one message", param="messages")
    return [_message(message, content_format, i) for i, message in enumerate(messages)]


def with_decoded_messages(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """The prompt fields of a chat with its messages decoded, where they are raw. `MalformedRequest` for bad JSON."""
    messages = prompt.get("messages")
    if not isinstance(messages, list) or not any(isinstance(message, msgspec.Raw) for message in messages):
        return prompt
    try:
        return {**prompt, "messages": [_ANY.decode(message) for message in messages]}
    except DECODE_ERRORS as error:
        raise not_json(error, param="messages") from error


class PlainMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


_PLAIN_MESSAGE = msgspec.json.Decoder(PlainMessage)


def plain_messages(messages: Sequence[Any]) -> list[PlainMessage] | None:
    """Raw messages decoded; None where one has more than a plain role and text."""
    try:
        return [_PLAIN_MESSAGE.decode(message) for message in messages]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def without_developer(conversation: list[ChatMessage]) -> list[ChatMessage]:
    """The conversation for a template without the role `developer`: such messages become `system`, and all system
    messages are merged in front, unless the only one is already the first."""
    if "developer" not in [message["role"] for message in conversation]:
        return conversation
    renamed = [_as_system(message) if message["role"] == "developer" else message for message in conversation]
    system = [i for i, message in enumerate(renamed) if message["role"] == "system"]
    if system == [0]:
        return renamed
    texts = [text for i in system if (text := _plain_text(renamed[i]["content"]))]
    merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _message(message: Any, content_format: ContentFormat, number: int) -> ChatMessage:
    if _is_plain(message) and content_format != "openai":
        return message  # type: ignore[no-any-return]
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise MalformedRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str):
        raise MalformedRequest(f"{where}.role must be a string", param=f"{where}.role")
    content = message.get("content")
    if not isinstance(content, str) or content_format == "openai" or content.startswith(BILLING_HEADER):
        content = _rewritten(role, content, content_format, f"{where}.content")
    normal: ChatMessage = {"role": role, "content": content}
    if role == "assistant":
        normal |= _assistant_fields(message, where)
    elif role == "tool" and "tool_call_id" in message:
        normal["tool_call_id"] = message["tool_call_id"]
    normal |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    if role == "developer":
        normal["tools"] = developer_tools(message.get("tools"))
    return normal


def _is_plain(message: Any) -> bool:
    """Whether a message has only a plain role and text, as most have; it needs no rewriting."""
    if type(message) is not dict or [*message] != _PLAIN_FIELDS or message["role"] not in _PLAIN_ROLES:
        return False
    content = message["content"]
    return isinstance(content, str) and not content.startswith(BILLING_HEADER)


def _rewritten(role: str, content: Any, content_format: ContentFormat, where: str) -> Any:
    parts = _parts(content, where)
    if role == "system":
        parts = [part for raw in parts if (part := _without_billing(raw)) is not None]
    content = _content(parts, content_format, where)
    if role == "tool" and isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = _plain_text(content)
    return content


def _parts(content: Any, where: str) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise MalformedRequest(f"{where} must be a string or a list of parts", param=where)
    return content


def _content(parts: Iterable[Any], content_format: ContentFormat, where: str) -> Any:
    """Parts as one string, those with text joined by newlines, or as a list of `{"type": "text", "text": ...}`."""
    read = [piece for part in parts if (piece := _part(part, where)) is not None]
    if content_format == "openai":
        return read
    return "\n".join(text for piece in read if (text := piece["text" if "text" in piece else "name"]))


def _part(part: Any, where: str) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise MalformedRequest(f"{where}: a part must be a string or an object", param=where)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_FIELDS or _is_named_media(part):
        if isinstance(part, MediaPart):
            return part
        raise _not_text(part, where)
    text = part.get(_TEXT_FIELDS[kind])
    if text is None and kind in _MAY_BE_NULL:
        return None
    if not isinstance(text, str):
        raise MalformedRequest(f"{where}: a part of type {kind} has no text", param=where)
    if kind == "tool_reference":
        return {"type": kind, "name": text}
    extra = {name: value for name, value in part.items() if name not in _PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _is_named_media(part: dict[str, Any]) -> bool:
    """Whether vLLM reads a part as media although its type is text: because it has a `uuid`."""
    return part.get("uuid") is not None and len(part.keys() & _MEDIA_FIELDS) > 1


def _not_text(part: dict[str, Any], where: str) -> Exception:
    kind = part.get("type")
    if isinstance(kind, str) or (kind is None and part.keys() & _MEDIA_FIELDS):
        return Unrenderable(UnreadReason.MEDIA, f"{where} has a part that is not text: {kind or 'media':.40}")
    return MalformedRequest(f"{where}: a part has no type", param=where)


def _without_billing(part: Any) -> Any:
    """A part of a system message without a leading billing line; None if nothing is left."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _assistant_fields(message: Mapping[str, Any], where: str) -> ChatMessage:
    fields: ChatMessage = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise MalformedRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    if calls:
        characters = max(map(argument_characters, calls))
        if characters > MAX_ARGUMENTS_CHARACTERS:
            raise Unrenderable(UnreadReason.TOO_LONG, f"{where} has a tool call of {characters} characters")
        fields["tool_calls"] = [normal_tool_call(call, f"{where}.tool_calls") for call in calls]
    if (reasoning := reasoning_of(message)) is not None:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """An assistant's reasoning, which has two names."""
    found = message.get("reasoning")
    return message.get("reasoning_content") if found is None else found


def _as_system(message: ChatMessage) -> ChatMessage:
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


# --- tools and their calls ---
#
# Engines parse them and write them back with fields in their own order, which is visible wherever a template prints
# JSON. This is the order of vLLM 0.32.


def normal_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The body's `tools` as vLLM writes them: known fields in a fixed order, absent ones null. None for no tools."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise MalformedRequest("tools must be a list", param="tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def normal_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise MalformedRequest(f"{where}: only calls of type function are supported", param=where)
    function = _ordered(function, "arguments", "name")
    function["arguments"] = _arguments(function.get("arguments"))
    return _ordered({**call, "function": function}, "id", "function", "type")


def argument_characters(call: Any) -> int:
    """Length of a tool call's arguments where they are text: JSON that `normal_tool_call` decodes at once."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return len(arguments) if isinstance(arguments, str) else 0


def developer_tools(tools: Any) -> Any:
    """Tools in a developer message: the engine orders their fields and adds none. Anything else stays as it is."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return tools
    return [
        _ordered(tool | _set(function=_ordered_function(tool.get("function"))), "function", "type") for tool in tools
    ]


def _ordered_function(function: Any) -> Any:
    if not isinstance(function, dict):
        return function
    return _ordered(function, "name", "description", "parameters", "strict")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedRequest(f"{where} must be an object with a function that has a name", param=where)
    inner = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    own = function.get("defer_loading")
    inner |= _set(strict=function.get("strict"), defer_loading=deferred if own is None else own)
    return {"type": tool.get("type", "function"), "function": inner} | _set(defer_loading=deferred)


def _arguments(arguments: Any) -> dict[str, Any]:
    """A call's arguments as a mapping. Anything else becomes empty, so that a conversation can continue after a model
    wrote bad JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _set(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _ordered(fields: Mapping[str, Any], *first: str) -> dict[str, Any]:
    """The same fields with `first` in front: the order in which engines write parsed JSON back."""
    return {**{name: fields[name] for name in first if name in fields}, **fields}
