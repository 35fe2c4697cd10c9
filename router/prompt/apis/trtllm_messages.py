"""What TensorRT-LLM makes of `/v1/messages`: `serve/anthropic_adapter.py` (docs/apis.md#messages)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from router.prompt.apis import anthropic
from router.prompt.apis.conversion import Conversion, not_converted

_BILLING = re.compile(r"x-anthropic-billing-header:\s*(?:[A-Za-z_][\w.-]*=[^;]*;\s*)+")


class TrtllmMessages(Conversion):
    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = anthropic.read_fields(body)
        chat: dict[str, Any] = {"messages": list(_messages(fields))}
        if variables := _variables(fields):
            chat["chat_template_kwargs"] = variables
        if fields.tools:
            chat["tools"] = [_tool(tool) for tool in fields.tools]
        return chat


def _variables(fields: anthropic.MessagesFields) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if fields.thinking is not None:
        variables["enable_thinking"] = fields.thinking.type != "disabled"
    if fields.output_config is not None and fields.output_config.effort:
        variables["reasoning_effort"] = fields.output_config.effort
    return variables


def _messages(fields: anthropic.MessagesFields) -> Iterator[dict[str, Any]]:
    """System messages before the first turn join the system prompt; later ones stay in their places."""
    leading = list(takewhile(lambda message: message.role == "system", fields.messages))
    system = _system(fields.system) + [text for message in leading for text in _texts(message.blocks)]
    if system:
        yield {"role": "system", "content": "\n\n".join(system)}
    for message in fields.messages[len(leading) :]:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        else:
            yield from _converted(message.role, message.content)


def _system(system: str | Sequence[anthropic.Block] | None) -> list[str]:
    if isinstance(system, str):
        return [system] if system else []
    texts = _texts(system or ())
    if texts and _BILLING.fullmatch(texts[0]):
        texts = texts[1:]
    return [text for text in texts if text]


def _texts(blocks: Iterable[anthropic.Block]) -> list[str]:
    return [_text(block) if isinstance(block, anthropic.Text) else _refuse(block) for block in blocks]


def _text(block: anthropic.Text) -> str:
    return block.text if block.text is not None else _refuse(block)


def _refuse(block: anthropic.Block) -> str:
    raise not_converted(f"a block of type {type(block).__name__} here")


def _converted(role: str, blocks: Sequence[anthropic.Block]) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in blocks:
        if isinstance(block, anthropic.Text):
            parts.append({"type": "text", "text": _text(block)})
        elif isinstance(block, anthropic.ToolUse) and role == "assistant":
            if not block.id or not block.name or block.input is None:
                _refuse(block)
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, anthropic.ToolResult) and block.tool_use_id and role == "user":
            if parts:
                yield {"role": role, "content": parts}
                parts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        elif isinstance(block, anthropic.Thinking) and role == "assistant" and block.thinking is not None:
            reasoning.append(block.thinking)
        else:
            _refuse(block)
    thought = {"reasoning": "".join(reasoning)} if reasoning else {}
    if calls:
        text = "".join(part["text"] for part in parts)
        yield {"role": role, "content": text or None, "tool_calls": calls, **thought}
    elif parts or thought:
        yield {"role": role, "content": parts or None, **thought}


def _result(block: anthropic.ToolResult) -> str:
    content = block.content
    if isinstance(content, list):
        texts = [item.get("text") if item.get("type") == "text" else None for item in content]
        if not all(isinstance(text, str) for text in texts):
            raise not_converted("a tool_result with more than text")
        content = "\n".join(str(text) for text in texts)
    return f"Tool execution failed: {content or ''}" if block.is_error else content or ""


def _tool(tool: anthropic.Tool) -> dict[str, Any]:
    if tool.input_schema is None:
        raise not_converted(f"the tool {tool.name!r} has no input_schema")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}
