"""Splits generated tokens into reasoning, content and calls, as vLLM's parsers do.

Each request has a new parser. It knows from the prompt whether reasoning is open, and nothing of a call that has begun
there: the rest of such a call is content. Markup is that of `loadtest/mock_engine/chat_template.jinja`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from loadtest.mock_engine.mock_config import TextCodec
from loadtest.mock_engine.vocabulary import MARKUP, Piece

THINK, END_THINK = "<think>", "</think>"
_TRANSITIONS = (
    ("content", THINK, "reasoning"),
    ("reasoning", END_THINK, "content"),
    ("content", "<｜tool▁calls▁begin｜>", "markup"),
    ("markup", "<｜tool▁call▁begin｜>", "name"),
    ("name", "<｜tool▁sep｜>", "arguments"),
    ("arguments", "<｜tool▁call▁end｜>", "markup"),
    ("markup", "<｜tool▁calls▁end｜>", "content"),
)


class OutputParser:
    def __init__(self, codec: TextCodec, end_token: int) -> None:
        self._codec = codec
        self._end = end_token
        self._next = {(state, self._token(mark)): after for state, mark, after in _TRANSITIONS}
        self.think, self.end_think = self._token(THINK), self._token(END_THINK)

    def ends_reasoning(self, prompt: Sequence[int]) -> bool | None:
        """Whether the last mark of reasoning in a prompt ends it; None without any."""
        marks = (self.think, self.end_think)
        return next((token == self.end_think for token in reversed(prompt) if token in marks), None)

    def parse(self, prompt: array[int], tokens: Iterable[int]) -> tuple[Piece, ...]:
        """The pieces of a chat's output behind `prompt`."""
        state, name, pieces = "reasoning" if self.ends_reasoning(prompt) is False else "content", "", []
        decode = self._codec.decode_stream(prompt, skip_special_tokens=False)
        for token in tokens:
            text = "" if token == self._end else decode(token) or ""
            after = self._next.get((state, token))
            if after is not None:
                pieces.append(Piece("name", name) if after == "arguments" else MARKUP)
                state, name = after, ""
            elif state in ("name", "markup"):
                name += text
                pieces.append(MARKUP)
            else:
                pieces.append(MARKUP if token == self._end else Piece(state, text))  # type: ignore[arg-type]
        return tuple(pieces)

    def plain(self, prompt: array[int], tokens: Iterable[int]) -> tuple[Piece, ...]:
        """The pieces of a completion's output, which has no markup."""
        decode = self._codec.decode_stream(prompt, skip_special_tokens=True)
        return tuple(Piece("content", decode(token) or "") for token in tokens)

    def _token(self, mark: str) -> int | None:
        tokens = self._codec.encode(mark, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 else None
