"""What vLLM 0.32 makes of `/v1/responses` for gpt-oss: `entrypoints/openai/responses/harmony.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from router.prompt.apis.conversion import Conversion, not_converted
from router.prompt.apis.response_fields import (
    ITEM,
    TEXT,
    Item,
    ResponseTool,
    read_fields,
)
from router.prompt.conversation import ChatMessage

_ENGINE_TOOLS = ("web_search_preview", "code_interpreter", "container")
"""Without a server for them, they are ignored."""


class HarmonyResponses(Conversion):
    """vLLM's conversion of the Responses API, as a chat that Harmony renders alike."""

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = read_fields(body)
        given = body.get("input")
        instructions = fields.get("instructions")
        messages: list[ChatMessage] = [] if instructions is None else [{"role": "system", "content": instructions}]
        if isinstance(given, list):
            messages += _messages([ITEM.read(item, f"input[{i}]") for i, item in enumerate(given)], bool(messages))
        else:
            messages.append({"role": "user", "content": TEXT.read(given, "input")})
        chat: dict[str, Any] = {"messages": messages}
        if tools := list(_functions(fields.get("tools") or ())):
            chat["tools"] = tools
        if (reasoning := fields.get("reasoning")) is not None and reasoning.effort is not None:
            chat["reasoning_effort"] = reasoning.effort
        return chat


def _messages(items: Iterable[Item], has_instructions: bool) -> Iterator[ChatMessage]:
    """Messages of a chat. The first of the system is the instructions, if there are no others."""
    called: set[str] = set()
    for number, item in enumerate(items):
        if item.type in (None, "message"):
            content: Any = item.content
            if not isinstance(content, str):
                content = [part.content for part in content or ()]
            first = content if isinstance(content, str) else content and content[0].get("text")
            if item.role == "assistant" and not first:
                raise not_converted("an empty message of the assistant")
            is_late = item.role in ("system", "developer") and (number or has_instructions)
            if content or not is_late:
                yield {"role": item.role, "content": content}
        elif item.type == "function_call":
            if item.call_id is None or item.name is None or item.arguments is None:
                raise not_converted("a function_call without name, arguments or call_id")
            called.add(item.call_id)
            function = {"name": item.name, "arguments": item.arguments}
            yield {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
        elif item.type == "function_call_output":
            if item.call_id not in called or not isinstance(item.output, str):
                raise not_converted("the output of an unknown call, or one that is not a string")
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        elif item.type == "reasoning":
            if not item.content or isinstance(item.content, str):
                continue
            if not (text := "\n".join(part.text or "" for part in item.content)):
                raise not_converted("an empty text of reasoning")
            yield {"role": "assistant", "reasoning": text}
        else:
            raise not_converted(f"an item of type {item.type}")


def _functions(tools: Iterable[ResponseTool]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        if tool.type == "function":
            yield {"function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
        elif tool.type not in _ENGINE_TOOLS:
            raise not_converted(f"a tool of type {tool.type}")
