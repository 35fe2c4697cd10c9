"""The fields of Anthropic's `/v1/messages` that prompts depend on.

Only what some engine reads; further fields are ignored, as by all engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_type_hints

import msgspec

from router.prompt.apis.conversion import Decoder


class Text(msgspec.Struct, tag="text", tag_field="type"):
    text: str | None = None


class Image(msgspec.Struct, tag="image", tag_field="type"):
    source: dict[str, Any] | None = None


class Thinking(msgspec.Struct, tag="thinking", tag_field="type"):
    thinking: str | None = None


class RedactedThinking(msgspec.Struct, tag="redacted_thinking", tag_field="type"):
    """Reasoning that only Anthropic can read."""


class ToolUse(msgspec.Struct, tag="tool_use", tag_field="type"):
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class ToolResult(msgspec.Struct, tag="tool_result", tag_field="type"):
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None


class ToolReference(msgspec.Struct, tag="tool_reference", tag_field="type"):
    name: str | None = None


class Tool(msgspec.Struct):
    """A tool of the client. Those of Anthropic's servers have no `input_schema`."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolDefinition(msgspec.Struct, tag="tool_definition", tag_field="type"):
    definition: Tool


class ToolAddition(msgspec.Struct, tag="tool_addition", tag_field="type"):
    """A tool that is available from here on."""

    tool: ToolReference | ToolDefinition


class ToolRemoval(msgspec.Struct, tag="tool_removal", tag_field="type"):
    """A tool that is not available from here on."""

    tool: ToolReference


Block: TypeAlias = (
    Text | Image | Thinking | RedactedThinking | ToolUse | ToolResult | ToolReference | ToolAddition | ToolRemoval
)


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [Text(self.content)] if isinstance(self.content, str) else self.content


class ThinkingConfig(msgspec.Struct):
    type: str


class OutputConfig(msgspec.Struct):
    effort: str | None = None


class MessagesFields(msgspec.Struct):
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_MESSAGE = Decoder.of(Message)
_FIELDS = {name: Decoder.of(kind) for name, kind in get_type_hints(MessagesFields).items() if name != "messages"}


def read_fields(body: Mapping[str, Any]) -> MessagesFields:
    """The fields of a body, raw or decoded. Raises `Unrenderable`."""
    messages = [_MESSAGE.read(message, f"messages[{i}]") for i, message in enumerate(body["messages"])]
    given = {name: decoder.read(body[name], name) for name, decoder in _FIELDS.items() if name in body}
    return MessagesFields(messages, **given)
