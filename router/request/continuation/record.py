"""What a client has received of one streamed answer, and the token ids that it was made of."""

from __future__ import annotations

from array import array

import msgspec

from router.request.continuation.stream_events import StreamChoice, StreamEvent, is_given, logprob_count


class SaidCall(msgspec.Struct, gc=False):
    """A tool call, as far as the client has it."""

    name: str = ""
    arguments: str = ""


class Record(msgspec.Struct):
    """One answer so far. Texts are UTF-8."""

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
    def size_bytes(self) -> int:
        size = len(self.prompt) + 4 * len(self.ids) + len(self.reasoning) + len(self.content)
        return size + sum(len(call.name) + len(call.arguments) for call in self.calls) if self.calls else size

    @property
    def has_said(self) -> bool:
        """Whether the client has something that another pod could contradict."""
        return bool(self.content or self.reasoning or self.calls or self.logprobs)

    def began(self, event: StreamEvent, prompt: bytes) -> None:
        """Remember what the first event says of the whole stream."""
        self.id, self.created, self.model = event.id, event.created, event.model
        if not self.forgotten:
            self.prompt = prompt

    def add(self, choice: StreamChoice) -> None:
        """Remember a piece of the answer. Raises `ValueError` for log probabilities that cannot be read."""
        if self.forgotten:
            return
        if choice.token_ids:
            self.ids.extend(choice.token_ids)
        if is_given(choice.logprobs):
            self.logprobs += logprob_count(choice.logprobs)
        if (delta := choice.delta) is None:
            self.content += (choice.text or "").encode()
            return
        if delta.content:
            self.content += delta.content.encode()
        if reasoning := delta.reasoning or delta.reasoning_content:
            self.reasoning += reasoning.encode()
        for piece in delta.tool_calls or ():
            if piece.index > len(self.calls) or piece.index < 0:
                raise ValueError(f"tool call {piece.index} after {len(self.calls)}")
            if piece.index == len(self.calls):
                self.calls.append(SaidCall())
            if piece.function is not None:
                call = self.calls[piece.index]
                call.name += piece.function.name or ""
                call.arguments += piece.function.arguments or ""

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
