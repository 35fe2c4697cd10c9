"""Asks for the usage of every streamed chat and completion, and hides from clients what they have not asked for.

The client receives, byte for byte, what the engine would send had nobody asked. Recorded from vLLM 0.32 and llama.cpp:
the counts come in an event of their own behind the last choice, and fields of the event that ends a choice move there.
With `--enable-force-include-usage`, every event of vLLM has counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from router.apis.openai import ASKED_USAGE
from router.guards import Bound
from router.types import UsageShown

MAX_EVENT_BYTES = 256 * 1024
"""A longer event passes as it came."""
MAX_HELD_BYTES = 256 * 1024
"""More ends of choices than a pod sends for a request: they pass as they came."""
MAX_READ = 1000
"""Events of one piece that are read, in 3 ms; the others pass as they came. Those of vLLM have 250 bytes or
more, and pieces at most 256 KiB."""
_ASKED_END = b"," + ASKED_USAGE + b"}"
_USAGE = b'"usage"'
_USAGE_FIELD = re.compile(rb',\s*"usage"\s*:\s*')
_FINISH, _SPACED_FINISH = b'"finish_reason":"', b'"finish_reason": "'
_DATA, _DONE = b"data:", b"[DONE]"
_HEAD_BYTES = 1024
"""How many bytes of the first piece show how the pod writes JSON and ends lines."""
_MOVED = ("system_fingerprint", "timings")
"""Fields that engines send with the last event: that of the usage, if it was asked for."""
_Fields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(_Fields)
_EVENT_BOUND, _OPTIONS_BOUND = Bound("event", MAX_EVENT_BYTES), Bound("stream_options", 4096, 100)
_NULL, _NO_CHOICES = msgspec.Raw(b"null"), msgspec.Raw(b"[]")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_OPTIONS = msgspec.json.Decoder(_StreamOptions | None, strict=False)


def shown_usage(options: msgspec.Raw | msgspec.UnsetType) -> UsageShown:
    """What the `stream_options` of a stream ask for. Where they are invalid, the pod says so."""
    if isinstance(options, msgspec.UnsetType):
        return UsageShown.NONE
    try:
        asked = _OPTIONS_BOUND.json(bytes(options), _OPTIONS) or _StreamOptions()
    except ValueError:
        return UsageShown.ALL
    if not asked.include_usage:
        return UsageShown.NONE
    return UsageShown.ALL if asked.continuous_usage_stats else UsageShown.AT_END


def asking_options(options: msgspec.Raw) -> _Fields:
    """The client's `stream_options`, with usage asked for."""
    given: _Fields = {} if options == _NULL else dict(_OPTIONS_BOUND.json(bytes(options), _FIELDS))
    return {**given, "include_usage": msgspec.Raw(b"true")}


def without_asking(body: bytes) -> bytes:
    """A body whose end asks for usage, as the client has sent it; any other body as it is."""
    return body[: -len(_ASKED_END)] + b"}" if body.endswith(_ASKED_END) else body


@dataclass(slots=True, eq=False)
class UsageFilter:
    """One stream. `hides_total`: the client has not asked for the usage at its end. `hides_steps`: nor for that in
    events with choices, if there are any. A piece need not be fed if it has neither `mark` nor usage nor a part of a
    line, and the filter `is_waiting` for nothing."""

    hides_total: bool
    hides_steps: bool
    is_single: bool = False
    """Whether the answer has one choice, so that one event ends it."""
    mark: bytes = _USAGE
    """What the event has that ends a choice, as this pod writes it."""
    is_waiting: bool = False
    _end: bytes = b""
    """What is behind each event."""
    _rest: bytearray = field(default_factory=bytearray)
    """The beginning of an event."""
    _held: list[bytes] = field(default_factory=list)
    """Events that end a choice, until the next event that has no choices: fields of it belong there."""
    _held_bytes: int = 0

    def feed(self, piece: bytes, *, may_have_usage: bool = True) -> bytes:
        """What the client gets of the next piece; b"" for nothing."""
        if not self._end:
            self._end = b"\r\n\r\n" if b"\r\n" in piece[:_HEAD_BYTES] else b"\n\n"
            if self.hides_total:
                self.mark = _SPACED_FINISH if b'": ' in piece[:_HEAD_BYTES] else _FINISH
        shown = self._filtered(piece, may_have_usage)
        self.is_waiting = bool(self._held or self._rest)
        return shown

    def end(self) -> bytes:
        """What is left when the pod has sent all."""
        left = self._released({}) + bytes(self._rest)
        self._rest.clear()
        return left

    def _filtered(self, piece: bytes, may_have_usage: bool) -> bytes:
        rest, end = self._rest, self._end
        if not rest and piece.endswith(end):
            return self._shown(piece, end, 0 if may_have_usage else -1)
        searched = max(len(rest) - len(end), 0)
        rest += piece
        whole = rest.rfind(end, searched) + len(end)
        if whole < len(end):
            whole = len(rest) if len(rest) > MAX_EVENT_BYTES else 0
        events = bytes(rest[:whole])
        del rest[:whole]
        return self._shown(events, end, 0)

    def _shown(self, events: bytes, end: bytes, usage: int) -> bytes:
        """What the client gets of whole events. Only those are looked at that end a choice, have usage, or follow.
        `usage`: from where usage is looked for; -1 where there is none."""
        shown, begin, done = list[bytes](), 0, -1
        finish = events.rfind(self.mark) if self.is_single else events.find(self.mark)
        usage = -1 if usage < 0 or events.rfind(_USAGE) < 0 else usage
        for _ in range(MAX_READ):
            finish = events.find(self.mark, begin) if 0 <= finish < begin else finish
            usage = events.find(_USAGE, begin) if 0 <= usage <= begin else usage
            if done < begin:
                done = events.find(_DONE, begin) if self._held else -1
            first = min((at for at in (finish, usage, done) if at >= 0), default=-1)
            until = events.find(end, first) + len(end)
            if first < 0 or until < len(end):
                break
            before = events.rfind(end, begin, first)
            at = before + len(end) if before >= 0 else begin
            shown += (events[begin:at], self._event(events[at:until]))
            begin = until
        return b"".join((*shown, events[begin:]))

    def _event(self, event: bytes) -> bytes:
        if event.rstrip().endswith(_DONE):
            return self._released({}) + event
        if _USAGE in event:
            fields = _fields_of(event)
            if fields.get("usage", _NULL) != _NULL:
                if fields.get("choices") == _NO_CHOICES:
                    return self._released(fields) if self.hides_total else event
                event = _without_usage(event, fields) if self.hides_steps else event
        if self.hides_total and self.mark in event:
            self._held.append(event)
            self._held_bytes += len(event)
            return self._released({}) if self._held_bytes > MAX_HELD_BYTES else b""
        return event

    def _released(self, last: _Fields) -> bytes:
        """The held events, with those fields of the last one that they would have had."""
        moved = [(b'"%b"' % name.encode(), bytes(last[name])) for name in _MOVED if name in last]
        held, self._held, self._held_bytes = self._held, [], 0
        return b"".join(_completed(event, moved) for event in held)


def _completed(event: bytes, moved: list[tuple[bytes, bytes]]) -> bytes:
    added = b"".join(b"," + name + b":" + value for name, value in moved if name not in event)
    end = event.rfind(b"}")
    return event[:end] + added + event[end:]


def _fields_of(event: bytes) -> _Fields:
    """The fields of an event with one object; none for any other."""
    try:
        return _EVENT_BOUND.json(event[event.index(_DATA) + len(_DATA) :], _FIELDS)
    except ValueError:
        return {}


def _without_usage(event: bytes, fields: _Fields) -> bytes:
    """The event without its usage; no other byte changes where that is not its first field."""
    usage = bytes(fields["usage"])
    for found in reversed(list(_USAGE_FIELD.finditer(event))):
        if event.startswith(usage, found.end()):
            return event[: found.start()] + event[found.end() + len(usage) :]
    kept = {name: value for name, value in fields.items() if name != "usage"}
    return event[: event.index(_DATA)] + b"data: " + msgspec.json.encode(kept) + b"\n\n"
