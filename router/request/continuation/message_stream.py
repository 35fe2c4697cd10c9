"""Writes the stream of a message from that of a chat, as vLLM 0.32 does.

Source: `message_stream_converter` in `entrypoints/anthropic/serving.py`. Texts are written as they came: both streams
escape them alike. Signatures, which vLLM draws, are made of the id of the response.
"""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_hexdigest

from router.guards import Bound
from router.request.continuation.stream_events import DATA, END, MAX_REMEMBERED_BYTES, MaybeRaw, is_given

_EVENT = Bound("event", 16 * MAX_REMEMBERED_BYTES)
_CALLS = Bound("tool calls", MAX_REMEMBERED_BYTES, 4096)
_PENDING = Bound("text inside a call", MAX_REMEMBERED_BYTES)
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Function(msgspec.Struct, gc=False, frozen=True):
    name: MaybeRaw = msgspec.UNSET
    arguments: MaybeRaw = msgspec.UNSET


class _Call(msgspec.Struct, gc=False):
    index: int = 0
    id: MaybeRaw = msgspec.UNSET
    function: _Function = _Function()


class _Delta(msgspec.Struct, gc=False):
    content: MaybeRaw = msgspec.UNSET
    reasoning: MaybeRaw = msgspec.UNSET
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta
    finish_reason: str | None = None
    stop_reason: MaybeRaw = msgspec.UNSET


class _Chunk(msgspec.Struct, gc=False):
    id: MaybeRaw = msgspec.UNSET
    model: MaybeRaw = msgspec.UNSET
    choices: list[_Choice] = []
    usage: _Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class MessageStream:
    """Of one message. Its chat has not both tools and stop strings: no string ends a call."""

    __slots__ = ("_call", "_calls", "_finish", "_id", "_index", "_kind", "_pending", "_stop", "_used")

    def __init__(self) -> None:
        self._id = b""
        self._index = 0
        """The number of the next block, or of the open one."""
        self._kind = self._call = b""
        """Type of the open block, and the id of its call."""
        self._calls: dict[int, bytes] = {}
        self._pending = bytearray()
        """Text that came while a call was open."""
        self._finish, self._stop = "stop", b"null"
        self._used = False
        """Whether a tool is called."""

    def feed(self, events: bytes) -> bytes:
        """What the client gets of whole events. Raises `ValueError`."""
        return b"".join(map(self._event, events.split(END)[:-1]))

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(DATA):
            return event + END  # comments keep connections open
        data = event[len(DATA) :].strip()
        if data == b"[DONE]":
            return self._end_block() + _named(b"message_stop", b"")
        chunk = _EVENT.json(data, _CHUNK)
        if not self._id:
            self._id = _string(chunk.id)
            head = b'"id":%b,"type":"message","role":"assistant","content":[],"model":' % self._id
            rest = b'%b,"stop_reason":null,"stop_sequence":null,"usage":%b' % (
                _string(chunk.model),
                _usage(chunk.usage),
            )
            return _named(b"message_start", b',"message":{%b%b}' % (head, rest))
        if not chunk.choices:
            return self._end_block() + self._ended(chunk.usage)
        return self._said(chunk.choices[0])

    def _said(self, choice: _Choice) -> bytes:
        delta, events = choice.delta, b""
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            self._stop = bytes(choice.stop_reason) if is_given(choice.stop_reason) else b"null"
        if thought := _text(delta.reasoning):
            if self._kind != b"thinking":
                events = self._begin(b"thinking", b'"thinking":""')
            events += self._piece(b"thinking", b"thinking", thought)
        if text := _text(delta.content):
            if self._kind == b"tool_use":
                self._pending += text[1:-1]
                _PENDING.check_size(len(self._pending))
            else:
                events += self._begin(b"text", b'"text":""') if self._kind != b"text" else b""
                events += self._piece(b"text", b"text", text)
        for call in delta.tool_calls or ():
            events += self._called(call)
        return events

    def _called(self, call: _Call) -> bytes:
        known, events = self._calls.get(call.index, b""), b""
        if is_given(call.id):
            known = self._calls[call.index] = _string(call.id)
            _CALLS.check_items(len(self._calls))
            if self._call != known and is_given(call.function.name):
                name = b'"id":%b,"name":%b,"input":{}' % (known, _string(call.function.name))
                events, self._call, self._used = self._begin(b"tool_use", name), known, True
        if known and known == self._call and (arguments := _text(call.function.arguments)):
            events += self._piece(b"input_json", b"partial_json", arguments)
        return events

    def _begin(self, kind: bytes, fields: bytes) -> bytes:
        events, self._kind = self._end_block(), kind
        block = b',"content_block":{"type":"%b",%b},"index":%d' % (kind, fields, self._index)
        return events + _named(b"content_block_start", block)

    def _piece(self, kind: bytes, field: bytes, text: bytes) -> bytes:
        delta = b',"delta":{"type":"%b_delta","%b":%b},"index":%d' % (kind, field, text, self._index)
        return _named(b"content_block_delta", delta)

    def _end_block(self) -> bytes:
        """The end of the open block, and the text that came inside a call as a block of its own."""
        if not self._kind:
            return b""
        events = b""
        if self._kind == b"thinking":
            signature = xxh3_128_hexdigest(b"%b %d" % (self._id, self._index)).encode()
            events = self._piece(b"signature", b"signature", b'"%b"' % signature)
        events += _named(b"content_block_stop", b',"index":%d' % self._index)
        self._kind = self._call = b""
        self._index += 1
        if self._pending:
            text, self._pending = b'"%b"' % bytes(self._pending), bytearray()
            events += self._begin(b"text", b'"text":""') + self._piece(b"text", b"text", text) + self._end_block()
        return events

    def _ended(self, usage: _Usage | None) -> bytes:
        reason, stop = _STOP_REASONS.get(self._finish), b"null"
        if self._used and reason == "end_turn":
            reason = "tool_use"
        elif self._stop.startswith(b'"') and reason == "end_turn":
            reason, stop = "stop_sequence", self._stop
        said = b',"delta":{"stop_reason":%b,"stop_sequence":%b}' % (msgspec.json.encode(reason), stop)
        return _named(b"message_delta", b'%b,"usage":%b' % (said, _usage(usage)))


def _named(kind: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b"%b}\n\n' % (kind, kind, fields)


def _string(raw: MaybeRaw) -> bytes:
    """A string as it came. Raises `ValueError` for other values."""
    text = bytes(raw) if is_given(raw) else b""
    if not text.startswith(b'"'):
        raise ValueError("not a string")
    return text


def _text(raw: MaybeRaw) -> bytes:
    """The same; b"" for one that is empty, or not given."""
    return _string(raw) if is_given(raw) and bytes(raw) != b'""' else b""


def _usage(usage: _Usage | None) -> bytes:
    """Input is what was neither read from the cache nor written to it."""
    given = usage or _Usage()
    details = given.prompt_tokens_details or _CachedTokens()
    counts = {"cache_creation": details.created_cache_tokens, "cache_read": details.cached_tokens}
    known = {f"{name}_input_tokens": count for name, count in counts.items() if count is not None}
    fresh = max(given.prompt_tokens - sum(known.values()), 0)
    return msgspec.json.encode({"input_tokens": fresh, "output_tokens": given.completion_tokens or 0, **known})
