"""What vLLM 0.32 makes of `/v1/responses`: `entrypoints/openai/responses/utils.py` (docs/apis.md#responses).

Only stateless requests: the messages of a previous response are known to its pod alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from router.prompt.apis.conversion import Conversion, not_converted
from router.prompt.apis.harmony_responses import HarmonyResponses
from router.prompt.apis.response_fields import ITEM, TEXT, Item, Part, ResponseTool, read_fields
from router.prompt.conversation import ChatMessage

_INPUT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool, which takes free text."""


class VllmResponses(Conversion):
    in_harmony = HarmonyResponses

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = read_fields(body)
        given = body.get("input")
        items = [ITEM.read(item, f"input[{i}]") for i, item in enumerate(given)] if isinstance(given, list) else None
        instructions = fields.get("instructions")
        messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
        if items is None:
            messages.append({"role": "user", "content": TEXT.read(given, "input")})
        else:
            messages += _messages(items)
        chat: dict[str, Any] = {"messages": messages}
        if items and _is_partial(items[-1]):
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        reasoning = fields.get("reasoning")
        if reasoning is not None and reasoning.effort is not None:
            chat["reasoning_effort"] = reasoning.effort
        if fields.get("chat_template_kwargs") is not None:
            chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
        if fields.get("tools"):
            chat["tools"] = list(_tools(fields["tools"]))
        return chat


def _is_partial(last: Item) -> bool:
    """Whether the model continues the last item."""
    if last.type not in (None, "message", "reasoning") or last.status not in ("in_progress", "incomplete"):
        return False
    if last.type != "reasoning" and isinstance(last.content, str):
        raise not_converted("a status of a message whose content is a string")
    return True


def _messages(items: Iterable[Item]) -> list[ChatMessage]:
    """Messages of a chat; text, reasoning and calls that follow each other become one message of the assistant."""
    messages: list[ChatMessage] = []
    for item in items:
        name, value = _converted(item)
        last = messages[-1] if messages else {}
        if not name:
            messages.append(value)
        elif last.get("role") == "assistant" and (name == "tool_calls" or last.get(name) is None):
            last[name] = [*last.get(name, ()), *value] if name == "tool_calls" else value
        else:
            messages.append({"role": "assistant", name: value})
    return messages


def _converted(item: Item) -> tuple[str, Any]:
    """("", a message), or a field of the assistant's message and its value."""
    if item.type == "function_call":
        if item.name is None or item.arguments is None or item.call_id is None:
            raise not_converted("a function_call without name, arguments or call_id")
        name = f"{item.namespace}__{item.name}" if item.namespace else item.name
        return "tool_calls", [_call(item.call_id, name, item.arguments)]
    if item.type == "custom_tool_call":
        if item.name is None or item.call_id is None:
            raise not_converted("a custom_tool_call without name or call_id")
        arguments = json.dumps({"input": item.input or ""}, ensure_ascii=False)
        return "tool_calls", [_call(item.call_id, item.name, arguments)]
    if item.type == "reasoning":
        return "reasoning", _reasoning(item)
    if item.type in ("function_call_output", "custom_tool_call_output"):
        message: ChatMessage = {"role": "tool", "content": _content(item.output)}
        return "", message if item.call_id is None else {**message, "tool_call_id": item.call_id}
    if item.type not in (None, "message") or item.role not in ("user", "system", "developer", "assistant"):
        raise not_converted(f"an item of type {item.type} and role {item.role}")
    if item.role == "assistant":
        return "content", _first_text(item)
    return "", {"role": item.role, "content": _content(item.content)}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Item) -> str:
    """The text of a reasoning item: its first part alone."""
    if item.encrypted_content:
        raise not_converted("encrypted reasoning")
    parts = item.content if isinstance(item.content, list) else []
    first = next(iter(parts or item.summary or ()), None)
    return (first.text or "") if first else ""


def _first_text(item: Item) -> str:
    """The content of an assistant's message: the text of its first part alone."""
    if isinstance(item.content, str):
        if item.id is not None and item.status is not None:
            raise not_converted("an output message whose content is a string")
        return item.content
    text = item.content[0].text if item.content else None
    if text is None:
        raise not_converted("an assistant's message that does not begin with text")
    return text


def _content(content: str | list[Part] | None) -> Any:
    return content if isinstance(content, str) else [part.content for part in content or ()]


def _tools(tools: Iterable[ResponseTool]) -> Iterator[dict[str, Any]]:
    """The functions among the tools: those of a namespace with its name in front, custom tools as functions."""
    for tool in tools:
        if tool.type == "namespace":
            inner = [each for each in tool.tools or () if each.type == "function"]
            yield from (_function(each, f"{tool.name}__{each.name}", each.parameters) for each in inner)
        elif tool.type == "function":
            yield _function(tool, tool.name, tool.parameters)
        elif tool.type == "custom":
            yield _function(tool, tool.name, _INPUT_SCHEMA)


def _function(tool: ResponseTool, name: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": tool.description, "parameters": parameters}
    if tool.type == "function":
        function |= {"strict": tool.strict, "defer_loading": tool.defer_loading}
    return {"type": "function", "function": function}
