"""What SGLang makes of `/v1/messages`: `anthropic/request_conversion.py` (docs/apis.md#messages).

Earlier thinking is written in the words of the pod's reasoning parser, and `thinking` sets what that parser needs: both
are unknown here, so such requests are routed without a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import msgspec

from router.prompt.apis import anthropic
from router.prompt.apis.conversion import Decoder, not_converted
from router.prompt.apis.sglang_chat import SglangChat
from router.prompt.sandbox import renders_late_system


class _AllowedTools(msgspec.Struct):
    type: str = "auto"
    name: str | None = None


_CHOICE = Decoder.of(_AllowedTools | None)


class SglangMessages(SglangChat):
    @cached_property
    def merges_system(self) -> bool:
        """Whether late system messages are moved in front."""
        return not renders_late_system(self.template.source)

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = anthropic.read_fields(body)
        if fields.thinking is not None:
            raise not_converted("thinking is set in the words of the pod's reasoning parser")
        chat: dict[str, Any] = {"messages": self._messages(fields)}
        if fields.output_config is not None and fields.output_config.effort is not None:
            effort = fields.output_config.effort
            chat["reasoning_effort"] = "max" if effort == "xhigh" else effort
        tools = [_tool(tool) for tool in fields.tools or () if tool.input_schema is not None]
        choice = _CHOICE.read(body.get("tool_choice"), "tool_choice") or _AllowedTools()
        if choice.type == "tool":
            tools = [tool for tool in tools if tool["function"]["name"] == choice.name]
        if tools and choice.type != "none":
            chat["tools"] = tools
        return chat

    def _messages(self, fields: anthropic.MessagesFields) -> list[dict[str, Any]]:
        late = [message for message in fields.messages if message.role == "system"]
        merges = bool(late) and self.merges_system
        system = _system(fields.system)
        if merges:
            system += [text for message in late if (text := _stripped(message))]
        chat: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if system else []
        for message in fields.messages:
            if message.role == "system" and merges:
                continue
            if isinstance(message.content, str):
                chat.append({"role": message.role, "content": message.content})
            else:
                chat += _converted(message.role, message.content)
        return chat


def _system(system: str | Sequence[anthropic.Block] | None) -> list[str]:
    if isinstance(system, str):
        return [system] if system.strip() else []
    return [block.text for block in system or () if isinstance(block, anthropic.Text) and block.text]


def _stripped(message: anthropic.Message) -> str:
    texts = [(block.text or "").strip() for block in message.blocks if isinstance(block, anthropic.Text)]
    return "\n".join(text for text in texts if text)


def _converted(role: str, blocks: Sequence[anthropic.Block]) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, anthropic.Text):
            parts += [] if block.text is None else [{"type": "text", "text": block.text}]
        elif isinstance(block, anthropic.ToolUse) and block.id:
            function = {"name": block.name or "", "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, anthropic.ToolResult) and role == "user":
            yield from _flushed(parts)
            for content in _results(block):
                yield {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}
        elif isinstance(block, anthropic.Thinking) and not block.thinking:
            continue
        elif not isinstance(block, anthropic.ToolReference):
            raise not_converted(f"a block of type {type(block).__name__} of the role {role}")
    if calls:
        yield {"role": role, "tool_calls": calls} | ({"content": _content(parts)} if parts else {})
    elif parts or role != "user":
        yield {"role": role, "content": _content(parts)}


def _flushed(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if parts:
        yield {"role": "user", "content": _content(list(parts))}
        parts.clear()


def _content(parts: list[dict[str, Any]]) -> Any:
    return parts[0]["text"] if len(parts) == 1 else parts or ""


def _results(block: anthropic.ToolResult) -> list[Any]:
    """The contents of the tool messages: references to tools are apart from text."""
    if not isinstance(block.content, list):
        return [block.content or ""]
    parts = [part for item in block.content if (part := _part(item)) is not None]
    groups = [list(group) for _, group in groupby(parts, key=lambda part: part["type"] == "tool_reference")]
    return [group[0]["text"] if len(group) == 1 and group[0]["type"] == "text" else group for group in groups] or [""]


def _part(item: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = item.get("type")
    if kind == "text" and isinstance(item.get("text", ""), str):
        return {"type": "text", "text": item["text"]} if item.get("text") else None
    if kind == "tool_reference":
        name = item.get("tool_name") or item.get("name")
        return {"type": kind, "name": name} if name else None
    raise not_converted(f"a part of type {kind!r} in a tool_result")


def _tool(tool: anthropic.Tool) -> dict[str, Any]:
    schema = tool.input_schema or {}
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": {**schema, "type": schema.get("type", "object")},
        "strict": bool(tool.strict),
    }
    return {"type": "function", "defer_loading": tool.defer_loading, "function": function}
