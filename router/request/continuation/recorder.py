"""Records the stream of the first pod while it passes through.

Where the router has asked for token ids, the client's bytes are those of a stream without them: null over the lists,
and events that only have ids are dropped.
"""

from __future__ import annotations

from router.request.continuation.record import Record
from router.request.continuation.stream import PodStream
from router.request.continuation.stream_events import Delta, StreamEvent, fields_of, is_given, without_ids, written
from router.request.continuation.terms import Terms


class Recorder(PodStream):
    __slots__ = ()

    def __init__(self, terms: Terms, *, asks_ids: bool) -> None:
        super().__init__(terms, Record(), asks_ids=asks_ids)

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
            record.began(read, self.prompt)
        if not read.choices:
            return event
        if len(read.choices) > 1 or read.choices[0].index:
            raise ValueError("a choice that was not asked for")
        choice = read.choices[0]
        delta, ends = choice.delta, choice.finish_reason is not None
        record.is_finished |= ends
        record.add(choice)
        if not self.asks_ids:
            return event
        if delta is not None:
            if self.terms.hides_reasoning and has_reasoning(delta):
                event, delta.reasoning, delta.reasoning_content = _without_reasoning(event), None, None
            if not ends and is_empty(delta) and not is_given(choice.logprobs):
                return b""
        return without_ids(event)


def is_empty(delta: Delta) -> bool:
    """Whether a delta has no field: such events are only sent with ids."""
    return delta.role is None and delta.content is None and delta.tool_calls is None and not has_reasoning(delta)


def has_reasoning(delta: Delta) -> bool:
    return delta.reasoning is not None or delta.reasoning_content is not None


def _without_reasoning(event: bytes) -> bytes:
    fields = fields_of(event)
    for choice in fields["choices"]:
        for name in ("reasoning", "reasoning_content"):
            choice["delta"].pop(name, None)
    return written(fields)
