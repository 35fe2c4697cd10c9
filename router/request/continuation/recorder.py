"""Records the stream of the first pod while it passes through.

Where the router has asked for token ids, the client's bytes are those of a stream without them: null over the lists,
and events that only have ids are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from router.request.continuation.record import Record
from router.request.continuation.stream import PodStream
from router.request.continuation.stream_events import (
    NULL,
    Delta,
    StreamChoice,
    StreamEvent,
    fields_of,
    ids_of,
    is_given,
    text_of,
    without_ids,
    written,
)
from router.request.continuation.terms import Terms

_TEXT_KEYS = (b'"delta":{"content":"', b'"delta":{"reasoning":"', b'"choices":[{"index":0,"text":"')
_EMPTY = Delta()
"""Events with it are only sent with ids."""
_IDS_KEY, _IDS_END = b',"token_ids":[', b"]"


class _Shape(NamedTuple):
    """What an event has in front of its text, between text and ids, and behind them; `shown_end` is the end of what the
    client gets."""

    head: bytes
    middle: bytes
    end: bytes
    shown_end: bytes
    is_reasoning: bool


class Recorder(PodStream):
    """`asks_ids`: whether this pod was asked for ids. Of events that only differ in text and ids, both are remembered
    as they are, and read later."""

    __slots__ = ("_ids", "_shape", "_text")

    def __init__(self, terms: Terms, *, asks_ids: bool) -> None:
        super().__init__(terms, Record(), asks_ids=asks_ids)
        self._shape: _Shape | None = None
        """That of the last event."""
        self._text, self._ids = bytearray(), bytearray()

    @property
    def current(self) -> Record:
        record, shape, text, ids = self.record, self._shape, self._text, self._ids
        if ids and shape is not None:
            self._text, self._ids = bytearray(), bytearray()
            try:
                read = ids_of(b"[%b]" % bytes(ids[:-1]).replace(_IDS_END, b","))
                said = text_of(bytes(text)).encode()
                (record.reasoning if shape.is_reasoning else record.content).extend(said)
                record.ids.extend(read)
            except ValueError:
                record.forget("unreadable")
        return record

    def feed(self, piece: bytes) -> bytes:
        return (not self._rest and self._plain(piece)) or super().feed(piece)

    def _event(self, event: bytes) -> bytes:
        if shown := self._plain(event):
            return shown
        _, self._shape = self.current, None
        return super()._event(event)

    def _plain(self, event: bytes) -> bytes:
        """What the client gets of an event with the shape of the last one; b"" for others."""
        shape = self._shape
        if shape is None or self.fault:
            return b""
        head, middle, end, shown_end, _ = shape
        text_end, ids_end = event.find(b'"', len(head)), len(event) - len(end)
        ids_at = text_end + len(middle)
        is_equal = event.startswith(head) and event.startswith(middle, text_end) and event.endswith(end)
        if not is_equal or ids_at >= ids_end or event.find(_IDS_END, ids_at) != ids_end:
            return b""
        if not self.record.forgotten:
            self._text += event[len(head) : text_end]
            self._ids += event[ids_at : ids_end + 1]  # with the bracket behind them, which is their only one
        return event[: ids_at - 1] + shown_end

    def _unread(self, event: bytes) -> bytes:
        """It passes, and the stream is not continued. What was only asked for by the router stays hidden."""
        if self.asks_ids and self.terms.hides_reasoning:
            return super()._unread(event)
        self.record.forget("unreadable")
        return without_ids(event) if self.asks_ids else event

    def _passed(self, event: bytes, read: StreamEvent) -> bytes:
        record = self.record
        if not self.has_begun:
            self.has_begun = True
            record.id, record.created, record.model = read.id, read.created, read.model
            record.prompt = b"" if record.forgotten else self.prompt
        if not read.choices:
            return event
        choice = read.choices[0]
        delta, ends = choice.delta, choice.finish_reason is not None
        record.is_finished |= ends
        record.add(choice)
        if not self.asks_ids:
            return event
        if delta is not None:
            if self.terms.hides_reasoning and (delta.reasoning, delta.reasoning_content) != (None, None):
                event, delta.reasoning, delta.reasoning_content = _without_reasoning(event), None, None
            if not ends and delta == _EMPTY and choice.logprobs is None:
                return b""
        self._shape = _shape_of(event, read, choice)
        return without_ids(event)


def _shape_of(event: bytes, read: StreamEvent, choice: StreamChoice) -> _Shape | None:
    """The shape of an event that has only a text and ids."""
    delta = choice.said
    text, key = delta.content or delta.reasoning, next((key for key in _TEXT_KEYS if key in event), b"")
    is_plain = choice.finish_reason is None and choice.token_ids and delta.role is None and not delta.tool_calls
    if not is_plain or not text or not key or is_given(read.usage) or choice.logprobs is not None:
        return None
    begin, ids_at = event.find(key) + len(key), event.rfind(_IDS_KEY) + len(_IDS_KEY)
    text_end, end = event.find(b'"', begin), event.find(_IDS_END, ids_at)
    if event[begin:text_end] != text.encode() or not text_end < ids_at < end:
        return None
    rest = event[end:]
    return _Shape(event[:begin], event[text_end:ids_at], rest, NULL + rest[1:], is_reasoning=not delta.content)


def _without_reasoning(event: bytes) -> bytes:
    fields = fields_of(event)
    for choice in fields["choices"]:
        for name in ("reasoning", "reasoning_content"):
            choice["delta"].pop(name, None)
    return written(fields)
