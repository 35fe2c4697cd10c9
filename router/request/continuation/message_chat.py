"""The chat that vLLM 0.32 makes of a streamed `/v1/messages` request, for the pod: a chat's stream has token ids.

Source: `entrypoints/anthropic/serving.py`. What is not known exactly is not converted, and goes as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from router.guards import Bound
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import Unrenderable
from router.request.continuation.stream_events import MAX_REMEMBERED_BYTES, MaybeRaw
from router.types import Endpoint, Pod

_VERSIONS = ("0.32.",)
"""Those whose code is known here."""
_LEAST_BUDGET = 1024
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_RAW = ("messages", "system", "tools", "chat_template_kwargs")
_SAME = ("temperature", "top_p", "top_k", "cache_salt")


class _Thinking(msgspec.Struct):
    """Disabled thinking is known to the engine alone."""

    type: Literal["enabled", "adaptive"]
    budget_tokens: int | None = None


class _Format(msgspec.Struct):
    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


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
    output_config: _Output | None = None
    thinking: _Thinking | None = None
    stop_sequences: list[str] | None = None
    tool_choice: _ToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None


_ASKED = msgspec.json.Decoder(_Asked)
_BODY = Bound("message", MAX_REMEMBERED_BYTES, 12_000)
"""An item takes up to 0.35 us."""


def converts(pod: Pod) -> bool:
    """Whether a pod has shown that it continues chats, and reads messages as the router does."""
    is_known = pod.engine == "vllm" and pod.version.startswith(_VERSIONS)
    return is_known and Endpoint.CHAT in pod.continues and pod.reads_alike(Endpoint.MESSAGES)


def chat_of(body: bytes, conversion: Conversion) -> bytes:
    """The body of the chat; b"" where it is not known."""
    try:
        asked = _BODY.json(body, _ASKED)
        raw = {name: one for name in _RAW if not isinstance(one := getattr(asked, name), msgspec.UnsetType)}
        effort = asked.output_config and {"effort": asked.output_config.effort}
        chat = conversion.sent_chat({**raw, "output_config": effort})
        return msgspec.json.encode(chat | _fields(asked, chat))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, Unrenderable):
        return b""


def _fields(asked: _Asked, chat: Mapping[str, Any]) -> dict[str, Any]:
    """All but the prompt. Raises `ValueError` where the engine might refuse the message, or the chat."""
    limit, output, thinking = asked.max_tokens, asked.output_config, asked.thinking
    fields: dict[str, Any] = {"model": asked.model, "max_tokens": limit, "max_completion_tokens": limit}
    fields |= {"stream": True, "stream_options": _USAGE, "tool_choice": "auto" if "tools" in chat else None}
    fields |= {name: getattr(asked, name) for name in _SAME} | {"stop": asked.stop_sequences}
    if any(_has_media(message.get("content")) for message in chat["messages"]):
        raise ValueError("ids replace no prompt with pictures")
    if output is not None and output.format is not None and output.format.schema:
        schema = {"name": output.format.type, "schema": output.format.schema}
        fields["response_format"] = {"type": output.format.type, "json_schema": schema}
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None or not _LEAST_BUDGET <= thinking.budget_tokens < limit:
            raise ValueError("not a budget")
        fields["thinking_token_budget"] = thinking.budget_tokens
    if asked.tool_choice is not None:
        fields["tool_choice"] = _choice(asked.tool_choice, [tool["function"]["name"] for tool in chat.get("tools", ())])
        fields["parallel_tool_calls"] = not asked.tool_choice.disable_parallel_tool_use
    return fields


def _has_media(content: Any) -> bool:
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _choice(choice: _ToolChoice, tools: list[str]) -> Any:
    if choice.type != "none" and (choice.name not in tools if choice.type == "tool" else not tools):
        raise ValueError("a choice among other tools")
    return _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
