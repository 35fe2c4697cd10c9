"""Breaks the rules by which chats become prompts, one at a time: what an engine with another rule would read.

A misreading is a function of a body, which returns the one that the template gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

Body: TypeAlias = Mapping[str, Any]


def _each(change: Callable[[dict[str, Any]], dict[str, Any]], body: Body) -> Body:
    return {**body, "messages": [change(dict(message)) for message in body["messages"]]}


def _joined(role: str, message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == role and isinstance(message["content"], list):
        message["content"] = " / ".join(part["text"] for part in message["content"])
    return message


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if message["role"] == "developer" else message


def _with_line(message: dict[str, Any]) -> dict[str, Any]:
    """The same with another beginning of the billing line, which is then not known as one."""
    if isinstance(message.get("content"), str):
        message["content"] = message["content"].replace("x-anthropic-billing-header", "billing")
    return message


def _without(*names: str) -> Callable[[Body], Body]:
    return partial(_each, lambda message: {name: value for name, value in message.items() if name not in names})


def _without_empty_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    if "" in (message.get("reasoning"), message.get("reasoning_content")):
        message["content"] = message["content"].rpartition("</think>")[2]
    return message


def _arguments(old: str, new: str) -> Callable[[Body], Body]:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls") or ()
        functions = [dict(call["function"]) for call in calls]
        for function in functions:
            function["arguments"] = function["arguments"].replace(old, new)
        if calls:
            paired = zip(calls, functions, strict=True)
            message["tool_calls"] = [{**call, "function": function} for call, function in paired]
        return message

    return partial(_each, change)


def _described(body: Body) -> Body:
    tools = body.get("tools") or ()
    named = [{**tool, "function": {**tool["function"], "description": "A tool."}} for tool in tools]
    return {**body, "tools": named} if named else body


def _not_continued(body: Body) -> Body:
    return {name: value for name, value in body.items() if name != "continue_final_message"}


MISREADINGS: Mapping[str, Callable[[Body], Body]] = {
    "text parts": partial(_each, partial(_joined, "user")),
    "parts of tool results": partial(_each, partial(_joined, "tool")),
    "developer": partial(_each, _as_user),
    "billing line": partial(_each, _with_line),
    "names of messages": _without("name"),
    "small numbers": _arguments("1e-07", '"1e-7"'),
    "large numbers": _arguments("18446744073709551616", "1.8446744073709552e+19"),
    "tool calls": _arguments('"b":1,"a"', '"a":1,"b"'),
    "arguments that are no object": _arguments("[1, 2]", '{"x": [1, 2]}'),
    "tools": _described,
    "reasoning": _without("reasoning", "reasoning_content"),
    "empty reasoning": partial(_each, _without_empty_reasoning),
    "continued message": _not_continued,
}
"""By the name of the rule."""
