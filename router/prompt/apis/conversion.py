"""The interface of conversions: from a body of another API to that of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.guards import short_float
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.harmony import Harmony
from router.prompt.template import ChatTemplate


class Conversion:
    """What one engine does with the bodies of one API, for one model. Pure; any thread may call it. `template`: None
    where only the engine has it; bodies whose conversion depends on it then raise `Unrenderable`."""

    in_harmony: type[Conversion] | None = None
    """The same for models in the Harmony format; None where the engine does something else with these."""

    drops_billing = False
    """Whether a text that begins with a billing header is dropped whole."""

    def __init__(self, template: ChatTemplate | Harmony | None) -> None:
        self._template = template

    @property
    def template(self) -> ChatTemplate | Harmony:
        """The model's template. Raises `Unrenderable` without one."""
        if self._template is None:
            raise Unrenderable(UnreadReason.NO_TEMPLATE, "the conversion depends on the chat template")
        return self._template

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat's body for `ChatTemplate.render`, from the fields of a body, raw or decoded. Raises `Unrenderable`
        where it cannot know what the engine does: the engine then answers for itself."""
        raise NotImplementedError

    def sent_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same as a request has it: arguments of calls are text. Raises `Unrenderable`."""
        chat = self.chat(body)
        if chat.get("tools") == []:
            raise not_converted("an empty list of tools differs from none")
        for message in chat["messages"]:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                if not isinstance(function["arguments"], str):
                    function["arguments"] = json.dumps(function["arguments"])
        return chat

    def template_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat's body as `ChatTemplate.render` needs it: `chat`, unless the engine reads chats in its own way."""
        return self.chat(body)

    def encloses(self, body: Mapping[str, Any]) -> bool:
        """Whether the tokenizer puts special tokens around the text of this chat."""
        return False

    def reads_alike(self, body: Mapping[str, Any]) -> bool:
        """Whether it surely reads a chat as vLLM's front end in Python does. Cheaper than to read it."""
        return False

    def reads_plain(self, messages: Sequence[msgspec.Raw]) -> bool:
        """Whether it reads a chat with only plain roles and texts as vLLM does."""
        return False


class Decoder(msgspec.Struct, frozen=True):
    kind: Any
    json: msgspec.json.Decoder[Any]

    @classmethod
    def of(cls, kind: Any) -> Decoder:
        """A decoder for `kind` that reads every number in bounded time."""
        return cls(kind, msgspec.json.Decoder(kind, float_hook=short_float))

    def read(self, value: Any, name: str) -> Any:
        """The field, raw or decoded. Raises `Unrenderable` for another type."""
        try:
            return self.json.decode(value) if isinstance(value, msgspec.Raw) else msgspec.convert(value, self.kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_converted(f"{name}: {error}") from error


def not_converted(message: str) -> Unrenderable:
    return Unrenderable(UnreadReason.NOT_CONVERTED, message)
