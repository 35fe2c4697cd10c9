"""What vLLM 0.32 makes of `/v1/messages`: `entrypoints/anthropic/serving.py` (docs/apis.md#messages)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from router.errors import MalformedRequest
from router.prompt.apis import anthropic
from router.prompt.apis.conversion import Conversion, not_converted
from router.prompt.conversation import BILLING_HEADER, Unrenderable
from router.prompt.harmony import SeparateTexts
from router.prompt.sandbox import renders_late_system

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_TOOL_CHANGES = (anthropic.ToolAddition, anthropic.ToolRemoval)


class VllmMessages(Conversion):
    drops_billing = True

    @cached_property
    def merges_system(self) -> bool:
        """Whether late system messages are moved in front: the bare template refuses them, with or without tools."""
        return not all(renders_late_system(text) for text in self.template.sources)

    @cached_property
    def disabled_effort(self) -> str:
        """The reasoning effort that stands for disabled thinking: `low` if the template refuses or ignores `none`."""
        without = self._rendered("none")
        if without is None or without in map(self._rendered, _EFFORTS):
            return "low"
        return "none"

    def _rendered(self, effort: str) -> str | SeparateTexts | None:
        try:
            return self.template.render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        except (MalformedRequest, Unrenderable):
            return None

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = anthropic.read_fields(body)
        chat: dict[str, Any] = {"messages": self._messages(fields)}
        if fields.chat_template_kwargs is not None:
            chat["chat_template_kwargs"] = fields.chat_template_kwargs
        if (effort := self._effort(fields)) is not None:
            chat["reasoning_effort"] = effort
        if (tools := _tools(fields)) is not None:
            chat["tools"] = tools
        return chat

    def _effort(self, fields: anthropic.MessagesFields) -> str | None:
        if fields.thinking is not None and fields.thinking.type == "disabled":
            return self.disabled_effort
        return fields.output_config.effort if fields.output_config else None

    def _messages(self, fields: anthropic.MessagesFields) -> list[dict[str, Any]]:
        system = [fields.system] if isinstance(fields.system, str) else _system_texts(fields.system or ())
        merges = any(message.role == "system" for message in fields.messages) and self.merges_system
        if merges:
            system += [text for message in fields.messages if (text := _system_text(message))]
        chat: list[dict[str, Any]] = [{"role": "system", "content": "".join(system)}] if any(system) else []
        for message in fields.messages:
            if message.role == "system":
                if not merges and (text := _system_text(message)):
                    chat.append({"role": "system", "content": text})
            elif isinstance(message.content, str):
                chat.append({"role": message.role, "content": message.content})
            else:
                chat += _converted(message.role, message.content)
        return chat


VllmMessages.in_harmony = VllmMessages


def _system_texts(blocks: Iterable[anthropic.Block]) -> list[str]:
    """The texts of system blocks. One that begins with the billing header is dropped whole."""
    texts = [block.text for block in blocks if isinstance(block, anthropic.Text) and block.text]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _system_text(message: anthropic.Message) -> str:
    """The text of a late system message; empty for any other message."""
    return "".join(_system_texts(message.blocks)) if message.role == "system" else ""


def _converted(role: str, blocks: Sequence[anthropic.Block]) -> list[dict[str, Any]]:
    """One message as several: the results of tools in front of the rest."""
    before: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in blocks:
        if isinstance(block, anthropic.Text):
            parts += [{"type": "text", "text": block.text}] if block.text else []
        elif isinstance(block, anthropic.ToolUse):
            calls.append(_call(block))
        elif isinstance(block, anthropic.ToolResult) and role == "user":
            before += _result(block)
        elif isinstance(block, anthropic.ToolResult):
            parts.append({"type": "text", "text": f"Tool result: {block.content or ''}"})
        elif isinstance(block, anthropic.Thinking):
            reasoning += [] if block.thinking is None else [block.thinking]
        elif isinstance(block, anthropic.Image):
            parts += [_image(block.source)] if block.source else []
        elif isinstance(block, _TOOL_CHANGES):
            raise not_converted("only system messages change tools")
    message: dict[str, Any] = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_text else parts
    return before if role == "user" and not parts else [*before, message]


def _call(block: anthropic.ToolUse) -> dict[str, Any]:
    if not block.id:
        raise not_converted("a tool_use without an id gets one from the clock")
    return {"id": block.id, "type": "function", "function": {"name": block.name or "", "arguments": block.input or {}}}


def _image(source: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _url(source)}}


def _url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _result(block: anthropic.ToolResult) -> list[dict[str, Any]]:
    """A result of a tool: its text, its images as a user message, the tools that it names."""
    head = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    items = block.content if isinstance(block.content, list) else []
    texts = [block.content] if isinstance(block.content, str) else _texts(items)
    found: list[dict[str, Any]] = [{**head, "content": "\n".join(texts)}]
    images = [item.get("source", {}) for item in items if item.get("type") == "image"]
    if images:
        found.append({"role": "user", "content": [_image(source) for source in images if _url(source)]})
    named = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    if any(named):
        references = [{"type": "tool_reference", "name": name} for name in named if name]
        found.append({**head, "content": references})
    return found


def _texts(items: Iterable[Mapping[str, Any]]) -> list[str]:
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise not_converted("the text of a tool_result is not a string")
    return texts


def _tools(fields: anthropic.MessagesFields) -> list[dict[str, Any]] | None:
    """The tools at the end of the conversation; an empty list differs from None."""
    in_system = [message for message in fields.messages if message.role == "system"]
    changes = [block for message in in_system for block in message.blocks if isinstance(block, _TOOL_CHANGES)]
    if not changes:
        return None if fields.tools is None else [_tool(tool) for tool in fields.tools]
    tools = {tool.name: _tool(tool) for tool in fields.tools or ()}
    removed: set[str] = set()
    for block in changes:
        if isinstance(block.tool, anthropic.ToolDefinition):
            name = block.tool.definition.name
            tools[name] = _tool(block.tool.definition)
        else:
            name = block.tool.name or ""
            if name not in tools:
                raise not_converted(f"a block changes the tool {name!r}, which is not declared")
            if isinstance(block, anthropic.ToolAddition):
                function = {**tools[name]["function"], "defer_loading": None}
                tools[name] = {**tools[name], "function": function}
        (removed.add if isinstance(block, anthropic.ToolRemoval) else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _tool(tool: anthropic.Tool) -> dict[str, Any]:
    if tool.input_schema is None:
        raise not_converted(f"the tool {tool.name!r} has no input_schema")
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema,
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": function}
