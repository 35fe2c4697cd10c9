"""Records the stream of a pod while it passes through: whole events, faults, the end, and what the client has of it.

Where the router has asked for token ids, the client's bytes are those of a stream without them: null over the lists,
and events that only have ids are dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from router.request.continuation.stream_events import (
    DATA,
    DONE,
    END,
    MAX_EVENT_BYTES,
    MAX_REMEMBERED_BYTES,
    NULL,
    CallPiece,
    Delta,
    StreamChoice,
    StreamEvent,
    fields_of,
    ids_of,
    is_given,
    prompt_place,
    read_event,
    split_prompt,
    text_of,
    without_ids,
    written,
)
from router.request.continuation.terms import Terms


class SaidCall(msgspec.Struct, gc=False):
    """A tool call, as far as the client has it."""

    name: bytearray = msgspec.field(default_factory=bytearray)
    arguments: bytearray = msgspec.field(default_factory=bytearray)


class Record(msgspec.Struct):
    """What a client has received of one streamed answer, and the token ids that it was made of. Texts are UTF-8."""

    id: str = ""
    created: int = 0
    model: str = ""
    prompt: bytes = b""
    """The ids of the prompt as the first pod wrote them; empty where it wrote none."""
    ids: array[int] = msgspec.field(default_factory=lambda: array("I"))
    """Those of the answer, from all pods together."""
    reasoning: bytearray = msgspec.field(default_factory=bytearray)
    content: bytearray = msgspec.field(default_factory=bytearray)
    """Also the text of a completion."""
    calls: list[SaidCall] = msgspec.field(default_factory=list)
    logprobs: int = 0
    is_finished: bool = False
    """Whether the choice has its finish reason."""
    has_usage: bool = False
    is_done: bool = False
    forgotten: str = ""
    """Why nothing is remembered of the answer any more."""

    @property
    def texts(self) -> list[bytearray]:
        """All texts, each of which only grows."""
        return [self.reasoning, self.content, *(text for call in self.calls for text in (call.name, call.arguments))]

    @property
    def size_bytes(self) -> int:
        return len(self.prompt) + 4 * len(self.ids) + sum(map(len, self.texts))

    @property
    def has_said(self) -> bool:
        """Whether the client has something that another pod could contradict."""
        return bool(self.content or self.reasoning or self.calls or self.logprobs)

    def add(self, choice: StreamChoice) -> None:
        """Remember a piece of the answer. Raises `ValueError`, and remembers nothing, for a call that is not the next
        one."""
        if self.forgotten:
            return
        said, logprobs = choice.said, choice.logprobs
        self.check_calls(said.tool_calls or ())
        self.ids.extend(choice.token_ids or ())
        self.logprobs += len(logprobs.content or logprobs.tokens or ()) if logprobs is not None else 0
        self.content += (said.content or "").encode()
        self.reasoning += (said.reasoning or said.reasoning_content or "").encode()
        for piece in said.tool_calls or ():
            if piece.index == len(self.calls):
                self.calls.append(SaidCall())
            if piece.function is not None:
                call = self.calls[piece.index]
                call.name += (piece.function.name or "").encode()
                call.arguments += (piece.function.arguments or "").encode()

    def check_calls(self, pieces: Iterable[CallPiece]) -> None:
        """Raises `ValueError` for a call that is not the next one."""
        count = len(self.calls)
        for piece in pieces:
            if not 0 <= piece.index <= count:
                raise ValueError(f"tool call {piece.index} after {count}")
            count += piece.index == count

    def forget(self, why: str) -> None:
        """Free what is remembered: the stream is not continued any more."""
        self.forgotten, self.prompt, self.ids = self.forgotten or why, b"", array("I")
        self.content, self.reasoning, self.calls = bytearray(), bytearray(), []

    def from_seam(self, kept: int, held: str = "") -> Record:
        """The record of a pod that goes on after `kept` tokens, whose text is known to be that which was said and
        `held`; with none kept, that of one which begins anew. Calls are made again in any case."""
        again = Record(self.id, self.created, self.model, self.prompt)
        if kept:
            again.ids, again.logprobs = self.ids[:kept], min(self.logprobs, kept)
            again.reasoning, again.content = bytearray(self.reasoning), self.content + held.encode()
        return again


ABORT = "abort"
MAX_HELD_BYTES = 1024 * 1024
"""Tool calls whose events have more are not held any longer."""


class Diverged(Exception):
    """The later pod sends something else than the client has. The message is a fault."""


@dataclass(slots=True, eq=False)
class PodStream:
    """The events of one pod. `feed` returns what the client gets; after a `fault` that is nothing."""

    terms: Terms
    record: Record
    asks_ids: bool = True
    """Whether this pod was asked for ids, which the client has not asked for."""
    prompt: bytes = b""
    """The ids of the prompt as the pod has written them."""
    fault: str = ""
    """Why the stream of this pod is broken: it has sent an error, or has ended too early."""
    is_over: bool = False
    """Whether the answer is complete although its pod still generates."""
    differs: bool = False
    """Whether the pod has sent something else than the client has."""
    has_begun: bool = False
    _rest: bytearray = field(default_factory=bytearray)
    """The beginning of an event."""
    _holds: bool = False
    _waiting: list[bytes] = field(default_factory=list)
    """Events from the first tool call on, until the last one is whole."""
    held_bytes: int = 0

    def __post_init__(self) -> None:
        self._holds = self.terms.holds_calls

    @property
    def current(self) -> Record:
        """What the client has, with the ids that it was made of."""
        return self.record

    @property
    def waiting_bytes(self) -> int:
        """Size of held tool calls, and of an event of which the rest is missing."""
        return self.held_bytes + len(self._rest)

    def feed(self, piece: bytes) -> bytes:
        """The client's bytes of a piece of the body."""
        if b"\r" in piece or self._rest.endswith(b"\r"):
            piece = self._with_line_feeds(piece)
        if not self._rest and piece.endswith(END) and piece.find(END) == len(piece) - len(END):
            return self._event(piece)
        begin = max(len(self._rest) - 1, 0)
        self._rest += piece
        if len(self._rest) > MAX_REMEMBERED_BYTES and self.asks_ids and not self.has_begun:
            begin = self._without_prompt()
        if len(self._rest) > MAX_EVENT_BYTES:
            self.fault, self._rest = "event too large", bytearray()
        if self._rest.find(END, begin) < 0:
            return b""
        events = bytes(self._rest).split(END)
        self._rest = bytearray(events.pop())
        return b"".join([self._event(event + END) for event in events])

    def _without_prompt(self) -> int:
        """Forget a prompt that is too long to be remembered while its ids come. Returns where the first event may
        end."""
        begin, end = prompt_place(self._rest)
        if begin >= 0:
            self.record.forget("too long")
            del self._rest[begin : end if end >= 0 else None]
        return max(begin, 0)

    def _with_line_feeds(self, piece: bytes) -> bytes:
        """The piece with LF for CRLF, of which it may have a part. Texts in JSON have both escaped."""
        if self._rest.endswith(b"\r"):
            del self._rest[-1:]
            piece = b"\r" + piece
        return piece.replace(b"\r\n", b"\n")

    def end(self) -> None:
        """The body has ended: a fault where that was not after `[DONE]`."""
        if not self.record.is_done and not self.fault and not self.record.forgotten:
            self.fault = "ended without [DONE]"

    def _event(self, event: bytes) -> bytes:
        if self.fault:
            return b""
        try:
            return self._read_event(event)
        except Diverged as error:
            self.fault, self.differs = str(error), True
            return b""
        except (ValueError, TypeError, LookupError, AttributeError):  # JSON of a pod may have any shape
            return self._released() + self._unread(event)

    def _read_event(self, event: bytes) -> bytes:
        if self.record.is_done:
            return b""
        if not event.startswith(DATA):
            if DATA in event:
                raise ValueError("other fields in front of the data")
            return event  # comments keep connections open
        if event in (DONE, b"data:[DONE]\n\n"):
            return self._done()
        if self.asks_ids and not self.has_begun:
            event, prompt = split_prompt(event)
            self.prompt = prompt or self.prompt
        return self._read(event, read_event(event))

    def _unread(self, event: bytes) -> bytes:
        """What the client gets of an event that cannot be read."""
        self.fault = "unreadable event"
        return b""

    def _read(self, event: bytes, read: StreamEvent) -> bytes:
        if not read.choices:
            if is_given(read.error):
                self.fault = "error event"
                return b""
            self.record.has_usage |= is_given(read.usage)
        for number, choice in enumerate(read.choices):
            if choice.finish_reason == ABORT:
                self.fault = "aborted"
                return b""
            if number or choice.index:
                raise ValueError("a choice that was not asked for")
        if self._holds and (self._waiting or any(one.delta and one.delta.tool_calls for one in read.choices)):
            return self._kept_back(event, read)
        return self._passed(event, read)

    def _kept_back(self, event: bytes, read: StreamEvent) -> bytes:
        """Hold an event until all calls are whole: the client has none that another pod would draw anew."""
        self._waiting.append(event)
        self.held_bytes += len(event)
        ends = any(choice.finish_reason is not None for choice in read.choices)
        is_full = self.held_bytes > MAX_HELD_BYTES or bool(self.record.forgotten)
        return self._released() if ends or is_full else b""

    def _released(self) -> bytes:
        held, self._waiting, self._holds, self.held_bytes = self._waiting, [], False, 0
        return b"".join(map(self._event, held))

    def _done(self) -> bytes:
        record = self.record
        is_whole = record.is_finished and (record.has_usage or not self.terms.wants_usage)
        if not is_whole and not record.forgotten:
            self.fault = "[DONE] before the end"
            return b""
        record.is_done = True
        return DONE

    def _passed(self, event: bytes, read: StreamEvent) -> bytes:
        """What the client gets of an event without a fault. Raises `ValueError`."""
        raise NotImplementedError


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
