"""The chat that vLLM 0.32 makes of a streamed `/v1/messages` request, for the pod: a chat's stream has token ids.

Source: `entrypoints/anthropic/serving.py`. What is not known exactly is not converted, and goes as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from router.guards import Bound
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import Unrenderable
from router.request.continuation.stream_events import MaybeRaw
from router.types import Endpoint, Pod

VERSION = "0.32."
_LEAST_BUDGET = 1024
_EFFORTS = (None, "low", "medium", "high", "xhigh", "max")
_SCHEMA = "json_schema"
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_RAW = ("messages", "system", "tools", "chat_template_kwargs")
_SAME = ("temperature", "top_p", "top_k", "cache_salt")


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that are known. The engine ignores `metadata` and `context_management`."""

    model: str
    max_tokens: Annotated[int, msgspec.Meta(gt=0)]
    messages: list[msgspec.Raw]
    stream: bool
    system: MaybeRaw = msgspec.UNSET
    tools: MaybeRaw = msgspec.UNSET
    chat_template_kwargs: MaybeRaw = msgspec.UNSET
    metadata: dict[str, Any] | None = None
    context_management: MaybeRaw = msgspec.UNSET
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None


_ASKED = msgspec.json.Decoder(_Asked)
_BODY = Bound("message", 256 * 1024, 12_000)
"""An item takes up to 0.35 us, a byte up to 14 ns: calls of tools in other letters than ASCII are escaped."""
_DIGITS, _LONG = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 100
"""Integers take time that grows with the square of their digits."""


def converts(pod: Pod) -> bool:
    """Whether a pod has shown that it continues chats, and reads messages as the router does."""
    is_proven = Endpoint.CHAT in pod.continues and pod.reads_alike(Endpoint.MESSAGES)
    return is_proven and pod.engine == "vllm" and pod.version.startswith(VERSION)


def chat_of(body: bytes, conversion: Conversion) -> bytes:
    """The body of the chat; b"" where it is not known."""
    try:
        _BODY.check_size(len(body))
        if _LONG in body.translate(_DIGITS):
            return b""
        asked = _BODY.json(body, _ASKED)
        raw = {name: one for name in _RAW if not isinstance(one := getattr(asked, name), msgspec.UnsetType)}
        chat = conversion.sent_chat({**raw, "output_config": asked.output_config})
        return msgspec.json.encode(chat | _fields(asked, chat))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, Unrenderable):
        return b""


def _fields(asked: _Asked, chat: Mapping[str, Any]) -> dict[str, Any]:
    """All but the prompt. Raises `ValueError` where the engine might refuse the message, or the chat."""
    limit, output, thinking = asked.max_tokens, asked.output_config or {}, asked.thinking
    fields: dict[str, Any] = {"model": asked.model, "max_tokens": limit, "max_completion_tokens": limit}
    fields |= {"stream": True, "stream_options": _USAGE, "tool_choice": "auto" if "tools" in chat else None}
    fields |= {name: getattr(asked, name) for name in _SAME} | {"stop": asked.stop_sequences}
    contents, form = (message.get("content") for message in chat["messages"]), output.get("format") or {}
    has_media = any(part["type"] != "text" for one in contents if isinstance(one, list) for part in one)
    if has_media or output.get("effort") not in _EFFORTS or form.get("type", _SCHEMA) != _SCHEMA:
        raise ValueError("pictures, or something unknown")
    if schema := form.get("schema"):
        fields["response_format"] = {"type": _SCHEMA, "json_schema": {"name": _SCHEMA, "schema": schema}}
    if thinking is not None and thinking["type"] != "adaptive":  # only the engine knows how it disables thinking
        fields["thinking_token_budget"] = budget = thinking["budget_tokens"]
        if thinking["type"] != "enabled" or not (isinstance(budget, int) and _LEAST_BUDGET <= budget < limit):
            raise ValueError("not a budget")
    if asked.tool_choice is not None:
        fields["tool_choice"] = _choice(asked.tool_choice, [tool["function"]["name"] for tool in chat.get("tools", ())])
        fields["parallel_tool_calls"] = not asked.tool_choice.get("disable_parallel_tool_use")
    return fields


def _choice(choice: Mapping[str, Any], tools: list[str]) -> Any:
    if choice["type"] == "tool" and choice["name"] in tools:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice["type"] != "none" and not tools:
        raise ValueError("a choice without tools")
    return _CHOICES[choice["type"]]
