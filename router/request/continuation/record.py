"""What a client has received of one streamed answer, and the token ids that it was made of."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from router.request.continuation.stream_events import CallPiece, StreamChoice


class SaidCall(msgspec.Struct, gc=False):
    """A tool call, as far as the client has it."""

    name: bytearray = msgspec.field(default_factory=bytearray)
    arguments: bytearray = msgspec.field(default_factory=bytearray)


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
