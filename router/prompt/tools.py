"""Rewrites tools and tool calls into the form that chat templates receive.

Engines parse them and write them back with fields in their own order, which is visible wherever a template prints JSON.
This is the order of vLLM 0.32 (`entrypoints/openai/chat_completion/protocol.py`, `renderers/chat_utils.py`). The
request itself does not change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.errors import MalformedRequest


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
