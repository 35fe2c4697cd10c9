"""What the streams of the first pod and of those that continue it have in common: whole events, faults, the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.request.continuation.record import Record
from router.request.continuation.stream_events import (
    DATA,
    DONE,
    END,
    MAX_EVENT_BYTES,
    MAX_REMEMBERED_BYTES,
    StreamEvent,
    is_given,
    prompt_place,
    read_event,
    split_prompt,
)
from router.request.continuation.terms import Terms

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
