"""Reads the events of streams of OpenAI's chats and completions, as vLLM writes them."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias, TypeGuard

import msgspec

from router.guards import Bound

END = b"\n\n"
DONE = b"data: [DONE]\n\n"
DATA = b"data:"
MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_REMEMBERED_BYTES = 1024 * 1024
"""Limit of one stream: planning with more would stop the event loop for too long."""
_HEAD_BYTES = 64 * 1024
"""Where the ids of the prompt begin in the first event, of about 6 bytes a token."""
_IDS_BOUND = Bound("prompt ids", MAX_REMEMBERED_BYTES, MAX_REMEMBERED_BYTES)
_EVENT = Bound("event", 1024 * 1024)
_JOINED = Bound("text", MAX_EVENT_BYTES, counted=b"")
MaybeRaw: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A value that is not decoded; it may be null."""
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_COMPACT = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
_PROMPT = re.compile(rb'"prompt_token_ids": ?\[')
_IDS = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[^\]]*\]')


class FunctionPiece(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct, gc=False):
    index: int = 0
    function: FunctionPiece | None = None


class Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None


class Logprobs(msgspec.Struct, gc=False):
    """One entry for each token: `content` of a chat, `tokens` of a completion."""

    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class StreamChoice(msgspec.Struct, gc=False):
    """`delta` is that of a chat, `text` that of a completion."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[_Id] | None = None

    @property
    def said(self) -> Delta:
        return self.delta or Delta(content=self.text)


class StreamEvent(msgspec.Struct, gc=False):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[StreamChoice] = []
    usage: MaybeRaw = msgspec.UNSET
    error: MaybeRaw = msgspec.UNSET


_EVENTS = msgspec.json.Decoder(StreamEvent)
_ANY: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_TEXT = msgspec.json.Decoder(str)
_IDS_LIST = msgspec.json.Decoder(list[_Id])
NULL = b"null"


def read_event(event: bytes) -> StreamEvent:
    """An event with a JSON object. Raises `ValueError`."""
    return _EVENT.json(event[len(DATA) :], _EVENTS)


def prompt_place(event: bytes | bytearray) -> tuple[int, int]:
    """Where the ids of the prompt begin and end, without brackets; twice -1 where there are none, and -1 as the end of
    a list that is not complete."""
    found = _PROMPT.search(event, 0, _HEAD_BYTES)
    return (found.end(), event.find(b"]", found.end())) if found is not None else (-1, -1)


def split_prompt(event: bytes) -> tuple[bytes, bytes]:
    """The first event with null for the ids of the prompt, and their list as it was written; b"" without one."""
    begin, end = prompt_place(event)
    if end < 0:
        return event, b""
    return event[: begin - 1] + NULL + event[end + 1 :], event[begin - 1 : end + 1]


def fields_of(event: bytes) -> dict[str, Any]:
    """The same with all of its fields. Raises `ValueError`."""
    return _EVENT.json(event[len(DATA) :], _ANY)


def written(fields: Any) -> bytes:
    """The event with these fields."""
    return b"data: " + msgspec.json.encode(fields) + END


def without_ids(event: bytes) -> bytes:
    """The event as it is where no ids were asked for. Quotes inside of JSON strings are escaped, so no text of a model
    is taken for the key."""
    begin = event.rfind(_COMPACT)
    if begin < 0 or _PROMPT_IDS in event:
        return _IDS.sub(rb"\1null", event)
    begin += len(_COMPACT) - 1
    return event[:begin] + NULL + event[event.find(b"]", begin) + 1 :]


def is_given(raw: MaybeRaw) -> TypeGuard[msgspec.Raw]:
    """Whether a field has a value, which is not null."""
    return isinstance(raw, msgspec.Raw) and bytes(raw) != NULL


def ids_of(raw: bytes) -> list[int]:
    """A list of token ids. Raises `ValueError`."""
    return _IDS_BOUND.json(raw, _IDS_LIST)


def text_of(inside: bytes) -> str:
    """The text that stands between the quotes of a string in JSON. Raises `ValueError`."""
    return _JOINED.json(b'"%b"' % inside, _TEXT)
