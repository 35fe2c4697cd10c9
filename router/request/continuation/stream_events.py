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
"""The first event has the ids of the prompt, about 6 bytes a token."""
_FIRST = Bound("first event", MAX_EVENT_BYTES, 4 * 1024 * 1024, b",")
_EVENT = Bound("event", 1024 * 1024)
_JOINED = Bound("text", MAX_EVENT_BYTES, counted=b"")
MaybeRaw: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A value that is not decoded; it may be null."""
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_COMPACT = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
_PROMPT_KEY = b'"prompt_token_ids":'
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


class StreamChoice(msgspec.Struct, gc=False):
    """`delta` is that of a chat, `text` that of a completion."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: MaybeRaw = msgspec.UNSET
    token_ids: list[_Id] | None = None
    prompt_token_ids: MaybeRaw = msgspec.UNSET


class StreamEvent(msgspec.Struct, gc=False):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[StreamChoice] = []
    usage: MaybeRaw = msgspec.UNSET
    prompt_token_ids: MaybeRaw = msgspec.UNSET
    error: MaybeRaw = msgspec.UNSET

    @property
    def prompt_ids(self) -> bytes | None:
        """The list of the prompt's ids, if the event has one."""
        for raw in (self.prompt_token_ids, *(choice.prompt_token_ids for choice in self.choices)):
            if is_given(raw):
                return bytes(raw)
        return None


class _ChatLogprobs(msgspec.Struct, gc=False):
    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


_EVENTS = msgspec.json.Decoder(StreamEvent)
_LOGPROBS = msgspec.json.Decoder(_ChatLogprobs)
_ANY: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_TEXT = msgspec.json.Decoder(str)
_IDS_LIST = msgspec.json.Decoder(list[_Id])
NULL = b"null"


def read_event(event: bytes, *, is_first: bool = False) -> StreamEvent:
    """An event with a JSON object. Next to the ids of the prompt, which are not decoded, the first has no more than
    others. Raises `ValueError`."""
    begin = event.find(_PROMPT_KEY) if is_first else -1
    if begin < 0:
        return _EVENT.json(event[len(DATA) :], _EVENTS)
    end = event.find(b"]", begin)
    _EVENT.check_size(len(event) - (end - begin))
    _EVENT.check_items(sum(event.count(one, 0, begin) + event.count(one, end) for one in _EVENT.counted))
    return _FIRST.json(event[len(DATA) :], _EVENTS)


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


def logprob_count(raw: MaybeRaw) -> int:
    """Number of tokens with log probabilities. Raises `ValueError`."""
    if not is_given(raw):
        return 0
    found = _EVENT.json(bytes(raw), _LOGPROBS)
    return len(found.content or found.tokens or ())


def ids_of(raw: bytes) -> list[int]:
    """A list of token ids. Raises `ValueError`."""
    return _FIRST.json(raw, _IDS_LIST)


def text_of(inside: bytes) -> str:
    """The text that stands between the quotes of a string in JSON. Raises `ValueError`."""
    return _JOINED.json(b'"%b"' % inside, _TEXT)
