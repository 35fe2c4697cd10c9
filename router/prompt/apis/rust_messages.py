"""What the Rust front end of vLLM 0.33 keeps of a chat (docs/engines.md#the-front-end-in-rust).

Fields that other front ends read are dropped. What it refuses is `Unrenderable` here: no pod with this front end
serves such a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from router.prompt.apis.conversion import not_converted
from router.prompt.conversation import MAX_ARGUMENTS_CHARACTERS, ChatMessage, UnreadReason, Unrenderable
from router.prompt.media import media_parts

_REASONING = ("reasoning", "reasoning_content", "thinking")
"""Fields with the same text, of which a message may have one."""


def read_messages(given: Sequence[Any], *, keeps_parts: bool) -> list[ChatMessage]:
    """The messages for a template that takes lists of parts, or strings; arguments are text. Raises `Unrenderable`."""
    if media_parts(given):
        raise Unrenderable(UnreadReason.MEDIA, "how this front end reads pictures is not known")
    messages = [_message(message) for message in given]
    for message in messages:
        texts: list[str] = message["content"]
        message["content"] = [{"type": "text", "text": text} for text in texts] if keeps_parts else "".join(texts)
    return messages


def read_tools(body: Mapping[str, Any], messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The tools of a body, with those of its developers behind. Raises `Unrenderable`."""
    if body.get("tools") == []:
        refuse("an empty list of tools")
    tools = [_tool(tool) for tool in body.get("tools") or ()]
    tools += [tool for message in messages for tool in message.get("tools", ())]
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        refuse("two tools of one name")
    return tools


def _message(message: Any) -> ChatMessage:
    """A message with a list of texts as its content."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role == "function":
        refuse(f"a message of the role {role!r:.40}")
    if role == "assistant":
        return {"role": role, **_assistant(message)}
    texts = _texts(message.get("content"))
    if texts is None or (role == "user" and not message["content"]):
        refuse(f"a message of the role {role!r:.40} without content")
    found: ChatMessage = {"role": role, "content": texts}
    if role == "tool":
        found["tool_call_id"] = _text_of(message, "tool_call_id")
    if role == "developer" and (tools := message.get("tools")):
        if not isinstance(tools, list):
            refuse("tools that are no list")
        found["tools"] = [_tool(tool) for tool in tools]
    return found


def _assistant(message: Mapping[str, Any]) -> ChatMessage:
    texts, calls = _texts(message.get("content")), message.get("tool_calls") or ()
    given = [name for name in _REASONING if name in message]
    reasoning = message[given[0]] if given else None
    if len(given) > 1 or not isinstance(reasoning, str | None) or not isinstance(calls, list | tuple):
        refuse("reasoning twice, or of another type")
    if not (texts or calls or reasoning):
        refuse("an assistant's message without text, reasoning and calls")
    found: ChatMessage = {"content": ["".join(texts or ())]}
    if reasoning:
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _texts(content: Any) -> list[str] | None:
    """The texts of a message's parts; None without content. Raises `Unrenderable` for other parts."""
    if content is None:
        return None
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        refuse("a content that is neither text nor parts")
    if any(part.get("type") != "text" for part in content):
        refuse("a part that is not text")
    return [_text_of(part, "text") for part in content]


def _text_of(fields: Mapping[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        refuse(f"no text in {name}")
    return text


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        refuse("a tool that is no function")
    description = function.get("description")
    if not isinstance(description, str | None):
        refuse("a description that is no text")
    written = {"name": _text_of(function, "name"), "description": description, "parameters": function.get("parameters")}
    deferred = function.get("defer_loading")
    own = {
        "strict": function.get("strict"),
        "defer_loading": tool.get("defer_loading") if deferred is None else deferred,
    }
    written |= {name: value for name, value in own.items() if value is not None}
    return {"type": "function", "function": written}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        refuse("a tool call that is not one of a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | None):
        refuse("arguments that are no text")
    if arguments and len(arguments) > MAX_ARGUMENTS_CHARACTERS:
        raise Unrenderable(UnreadReason.TOO_LONG, f"a tool call of {len(arguments)} characters")
    written = {"name": _text_of(function, "name"), "arguments": arguments or "{}"}
    return {"id": _text_of(call, "id"), "type": "function", "function": written}


def refuse(what: str) -> NoReturn:
    raise not_converted(f"{what}: the front end in Rust refuses it")
