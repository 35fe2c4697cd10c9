"""What vLLM 0.32 makes of `/v1/responses` (docs/apis.md#responses), for gpt-oss and for other models.

Its `entrypoints/openai/responses/harmony.py` and `utils.py`. Only stateless requests: the messages of a previous
response are known to its pod alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from router.prompt.apis.conversion import Conversion, Decoder, not_converted
from router.prompt.conversation import ChatMessage

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
"""The field with the text, by type of content part."""
_PICTURE = ("image_url", "uuid")
_ENGINE_KNOWS = ("previous_response_id", "previous_input_messages", "prompt")


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    uuid: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        is_picture = self.type == "input_image" or (self.uuid is not None and self.image_url is not None)
        names = _PICTURE if is_picture else (_PARTS.get(self.type, ""),)
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        return {"type": self.type, **given}


class Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    id: str | None = None
    content: str | list[Part] | None = None
    status: str | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


class ResponseTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None


_ITEM = Decoder.of(Item)
_TEXT = Decoder.of(str)
_FIELDS = {
    "instructions": Decoder.of(str | None),
    "tools": Decoder.of(list[ResponseTool] | None),
    "reasoning": Decoder.of(Reasoning | None),
    "truncation": Decoder.of(str | None),
    "chat_template_kwargs": Decoder.of(dict[str, Any] | None),
}


def _read_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields besides `input`, decoded. Raises `Unrenderable`, also where only the pod knows the whole prompt."""
    for name in _ENGINE_KNOWS:
        if body.get(name) is not None:
            raise not_converted(f"{name}: only its pod knows these messages")
    fields = {name: decoder.read(body[name], name) for name, decoder in _FIELDS.items() if name in body}
    if fields.get("truncation") == "auto":
        raise not_converted("the engine may truncate the input")
    return fields


def _read_items(body: Mapping[str, Any]) -> list[Item]:
    """The items of `input`; a text is one message of the user. Raises `Unrenderable`."""
    given = body.get("input")
    if isinstance(given, list):
        return [_ITEM.read(item, f"input[{i}]") for i, item in enumerate(given)]
    return [Item(role="user", content=_TEXT.read(given, "input"))]


_ENGINE_TOOLS = ("web_search_preview", "code_interpreter", "container")
"""Without a server for them, they are ignored."""


class HarmonyResponses(Conversion):
    """vLLM's conversion of the Responses API, as a chat that Harmony renders alike."""

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = _read_fields(body)
        items, instructions = _read_items(body), fields.get("instructions")
        messages: list[ChatMessage] = [] if instructions is None else [{"role": "system", "content": instructions}]
        messages += _harmony_messages(items, bool(messages))
        chat: dict[str, Any] = {"messages": messages}
        if tools := list(_functions(fields.get("tools") or ())):
            chat["tools"] = tools
        if (reasoning := fields.get("reasoning")) is not None and reasoning.effort is not None:
            chat["reasoning_effort"] = reasoning.effort
        return chat


def _harmony_messages(items: Iterable[Item], has_instructions: bool) -> Iterator[ChatMessage]:
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
        fields = _read_fields(body)
        items, instructions = _read_items(body), fields.get("instructions")
        messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
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
