"""The fields of a body of OpenAI's Responses API that change the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.prompt.apis.conversion import Decoder, not_converted

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
"""The field with the text, by type of content part."""
_PICTURE = ("image_url", "uuid")
_ENGINE_KNOWS = ("previous_response_id", "previous_input_messages", "prompt")


class Part(msgspec.Struct):
    """A part of a message, a reasoning item or the output of a tool."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    uuid: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        """As a part of a chat's message."""
        is_picture = self.type == "input_image" or (self.uuid is not None and self.image_url is not None)
        names = _PICTURE if is_picture else (_PARTS.get(self.type, ""),)
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        return {"type": self.type, **given}


class Item(msgspec.Struct):
    """An item of the input: a message, or what its type says."""

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
    """A tool of any type."""

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


ITEM = Decoder.of(Item)
TEXT = Decoder.of(str)
_FIELDS = {
    "instructions": Decoder.of(str | None),
    "tools": Decoder.of(list[ResponseTool] | None),
    "reasoning": Decoder.of(Reasoning | None),
    "truncation": Decoder.of(str | None),
    "chat_template_kwargs": Decoder.of(dict[str, Any] | None),
}


def read_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields besides `input`, decoded. Raises `Unrenderable`, also where only the pod knows the whole prompt."""
    for name in _ENGINE_KNOWS:
        if body.get(name) is not None:
            raise not_converted(f"{name}: only its pod knows these messages")
    fields = {name: decoder.read(body[name], name) for name, decoder in _FIELDS.items() if name in body}
    if fields.get("truncation") == "auto":
        raise not_converted("the engine may truncate the input")
    return fields
