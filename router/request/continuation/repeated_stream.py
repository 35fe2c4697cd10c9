"""Streams of messages and responses, which have no token ids: another pod makes them again, and both are compared.

Equal must be all events but for ids, their numbers, usage and signatures, and all texts, however they are cut into
deltas. The client keeps the ids and numbers of its first pod.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from router.guards import Bound
from router.request.continuation.stream import Diverged, PodStream, Record
from router.request.continuation.stream_events import DATA, END, MaybeRaw, is_given
from router.request.continuation.terms import Terms

MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete"})
_ERRORS = frozenset({"error", "response.failed"})
_ABORTED = frozenset({"cancelled", "failed"})
_IDS = frozenset({"id", "item_id", "call_id"})
_VARIES = frozenset({"sequence_number", "created_at", "usage", "signature"})
_EVENT = Bound("event", 4 * 1024 * 1024, counted=b"{")
_STEP_BYTES = 400
_Key: TypeAlias = tuple[object, ...]


class _Piece(msgspec.Struct, gc=False):
    """The delta of a message."""

    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | msgspec.UnsetType | None = msgspec.UNSET


class _ResponseState(msgspec.Struct, gc=False):
    status: str | None = None
    created_at: MaybeRaw = msgspec.UNSET


class _NamedEvent(msgspec.Struct, gc=False):
    type: str = ""
    index: int | None = None
    output_index: int | None = None
    content_index: int | None = None
    summary_index: int | None = None
    sequence_number: int | None = None
    delta: str | _Piece | None = None
    response: _ResponseState | None = None
    error: MaybeRaw = msgspec.UNSET

    def key(self, field: str) -> _Key:
        """Deltas with the same key, one behind the other, are one text."""
        return self.type, self.index, self.output_index, self.content_index, self.summary_index, field

    @property
    def text(self) -> tuple[str, str]:
        """The field of the text in the delta, and the text; two empty ones for an event without."""
        if isinstance(self.delta, str):
            return "delta", self.delta
        for field in ("text", "thinking", "partial_json"):
            if (text := getattr(self.delta, field, None)) is not None:
                return field, text
        return "", ""


_NAMED = msgspec.json.Decoder(_NamedEvent)
_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class SaidEvents(Record):
    """What the client has of such a stream."""

    steps: list[tuple[_Key, bytearray]] = msgspec.field(default_factory=list)
    """Data of events, and texts that came in deltas."""
    number: int = -1
    """The `sequence_number` of the last event."""
    created_at: bytes = b""

    @property
    def size_bytes(self) -> int:
        return sum(len(said) + _STEP_BYTES for _, said in self.steps)

    def add_step(self, key: _Key, said: bytes) -> None:
        if self.forgotten or not said:
            return
        if key[-1] and self.steps and self.steps[-1][0] == key:
            self.steps[-1][1].extend(said)
        else:
            self.steps.append((key, bytearray(said)))

    def forget(self, why: str) -> None:
        super().forget(why)
        self.steps = []


class RepeatedStream(PodStream):
    """`record`: what the client has already, of earlier pods."""

    __slots__ = ("_at", "_end", "_names", "_place")
    record: SaidEvents

    def __init__(self, terms: Terms, record: SaidEvents) -> None:
        super().__init__(terms, record)
        self._at = self._place = 0
        """The step that is compared, and the place in its text."""
        self._end = len(record.steps)
        self._names: dict[bytes, bytes] = {}
        """The client's ids by those of this pod."""

    def _read_event(self, event: bytes) -> bytes:
        begin = event.find(DATA)
        if begin < 0:
            return event
        data = event[begin + len(DATA) :]
        if data.strip() == b"[DONE]":
            if not (self.record.is_done or self.record.forgotten):
                self.fault = "[DONE] before the end"
            return b"" if self.fault else event
        return b"" if self.record.is_done else self._named(event, data, _EVENT.json(data, _NAMED))

    def _unread(self, event: bytes) -> bytes:
        if self._end:
            return super()._unread(event)
        self.record.forget("unreadable")
        return event

    def _named(self, event: bytes, data: bytes, read: _NamedEvent) -> bytes:
        said = self.record
        self.fault = _fault(read)
        if self.fault or read.type == "ping":
            return b"" if self.fault else event
        field, text = read.text
        key, new = read.key(field), text.encode()
        if self._at < self._end and (new or not field):
            new = self._fresh(key, new, data)
            if not new:
                return b""
        if self._end:
            if field and not new:
                return b""
            event = self._rewritten(event, data, read, field, new.decode())
        if read.sequence_number is not None:
            said.number = said.number + 1 if self._end else read.sequence_number
        if read.response is not None and is_given(read.response.created_at):
            said.created_at = said.created_at or bytes(read.response.created_at)
        said.add_step(key, new if field else event[event.find(DATA) + len(DATA) :])
        said.is_finished |= read.type == "message_delta"
        said.is_done = read.type in _ENDS
        return event

    def _fresh(self, key: _Key, text: bytes, data: bytes) -> bytes:
        """The part of a text that the client does not have; b"" for an event, which it has."""
        steps, last = self.record.steps, self._end - 1
        if self._place and self._place == len(steps[self._at][1]):
            self._at, self._place = self._at + 1, 0
        known_key, said = steps[self._at]
        if known_key != key or not (key[-1] or _alike(bytes(said), data, self._names)):
            raise Diverged("the pod sends something else than the client has")
        if not key[-1]:
            self._at += 1
            return b""
        known = bytes(said[self._place : self._place + len(text)])
        self._place += len(known)
        if not text.startswith(known) or (len(known) < len(text) and self._at < last):
            raise Diverged("the pod sends other text than the client has")
        if self._at == last and self._place == len(said):
            self._at = self._end
        return text[len(known) :]

    def _rewritten(self, event: bytes, data: bytes, read: _NamedEvent, field: str, text: str) -> bytes:
        """The event with the ids and numbers of the client's stream, and with this text."""
        fields: dict[str, Any] = dict(_EVENT.json(data, _OBJECT))
        if field == "delta":
            fields["delta"] = text
        elif field:
            fields["delta"] = {**_EVENT.json(bytes(fields["delta"]), _OBJECT), field: text}
        if read.sequence_number is not None:
            fields["sequence_number"] = self.record.number + 1
        if read.response is not None and self.record.created_at:
            created = msgspec.Raw(self.record.created_at)
            fields["response"] = {**_EVENT.json(bytes(fields["response"]), _OBJECT), "created_at": created}
        event = event[: event.find(DATA)] + b"data: " + msgspec.json.encode(fields) + END
        for own, name in self._names.items():
            event = event.replace(own, name)
        return event


def _fault(read: _NamedEvent) -> str:
    """Why the stream has failed with this event."""
    if read.type in _ERRORS or (not read.type and is_given(read.error)):
        return "error event"
    if isinstance(read.delta, _Piece) and read.delta.stop_reason is None:
        return "aborted"
    return "aborted" if read.response is not None and read.response.status in _ABORTED else ""


def _alike(old: bytes, new: bytes, names: dict[bytes, bytes], depth: int = 2) -> bool:
    """Whether two objects say the same; collects what names the same things in them. Strings of JSON escape the quotes
    that names have here, so no text of a model is taken for a name."""
    before, after = _EVENT.json(old, _OBJECT), _EVENT.json(new, _OBJECT)
    if before.keys() != after.keys():
        return False
    for name, raw in before.items():
        value, other = bytes(raw), bytes(after[name])
        if name in _IDS and value.startswith(b'"') and other.startswith(b'"'):
            if value != other:
                names[other] = value
        elif name not in _VARIES and value != other:
            if not depth or not value.startswith(b"{") or not other.startswith(b"{"):
                return False
            if not _alike(value, other, names, depth - 1):
                return False
    return True
