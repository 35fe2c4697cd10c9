"""The calls of tools that a mock engine makes: those that a user's message lists.

A line `tool_call: NAME {"argument": ...}` is one call. The engine makes the calls in their order, one a response, and
answers the result of the last one with text. The conversation is the only state, so any engine of a fleet continues it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"^tool_call: (\S+) (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON."""

    name: str
    arguments: str


def next_call(chat: Mapping[str, Any]) -> ToolCall | None:
    """The call that a chat's last list of calls has next; None after the last one, or if the chat has no such tool."""
    calls_made = 0
    for message in reversed(chat["messages"]):
        if message["role"] == "user" and (listed := _CALL.findall(_text(message.get("content")))):
            call = ToolCall(*listed[calls_made]) if calls_made < len(listed) else None
            return call if call is not None and call.name in _tool_names(chat) else None
        calls_made += len(message.get("tool_calls") or ())
    return None


def with_call(chat: Mapping[str, Any], call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    return {**chat, "messages": [*chat["messages"], message], "add_generation_prompt": False}


def _tool_names(chat: Mapping[str, Any]) -> set[str]:
    return {tool["function"]["name"] for tool in chat.get("tools") or ()}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content or () if isinstance(part, dict)]
    return "\n".join(text for text in parts if isinstance(text, str))
