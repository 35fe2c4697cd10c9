"""What is a client told about cached tokens when two pods served it?

A decode pod counts what it was handed as cached, or as nothing; only what the prefill pod found in its own cache was
saved. `usage.prompt_tokens_details.cached_tokens` is overwritten where the engine tells it, and not one other byte
changes. This file never adds a usage, and never holds more of a stream than its last unfinished line.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from router.engines.openai import decode

MAX_HELD_BYTES = 4 * 1024 * 1024
"""An answer, or a line of a stream, that is longer is not corrected."""
_SAID = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_MARK = b'"cached_tokens"'
_DATA = b"data:"


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Usage(msgspec.Struct):
    """The `usage` of an answer; engines leave the details out or null unless they are configured to tell them."""

    prompt_tokens_details: _PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return details.cached_tokens if details else None


class _Answer(msgspec.Struct):
    usage: Usage | None = None


class UsageCorrection:
    """Fed with every piece of one answer, in order. With `cached_tokens` None all passes as it comes; an answer that is
    not a `stream` comes out at the end, whole."""

    def __init__(self, cached_tokens: int | None, stream: bool) -> None:
        self._cached_tokens = cached_tokens
        self._stream = stream
        self._held = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """What may go on now."""
        if self._cached_tokens is None:
            return piece
        end = piece.rfind(b"\n") + 1 if self._stream else 0
        if not end:
            self._held += piece
            return b"" if len(self._held) <= MAX_HELD_BYTES else self._give_up()
        lines = bytes(self._held) + piece[:end]
        self._held = bytearray(piece[end:])
        return _corrected_lines(lines, self._cached_tokens)

    def _give_up(self) -> bytes:
        self._cached_tokens = None
        return self.end()

    def end(self) -> bytes:
        """What is left, once the last piece is in."""
        rest, self._held = bytes(self._held), bytearray()
        if self._cached_tokens is None:
            return rest
        correct = _corrected_lines if self._stream else _corrected
        return correct(rest, self._cached_tokens)


def _corrected_lines(lines: bytes, cached_tokens: int) -> bytes:
    if _MARK not in lines:
        return lines
    return b"\n".join(_corrected_line(line, cached_tokens) for line in lines.split(b"\n"))


def _corrected_line(line: bytes, cached_tokens: int) -> bytes:
    """One line of an event stream, without its end."""
    if not line.startswith(_DATA):
        return line
    return _DATA + _corrected(line[len(_DATA) :], cached_tokens)


def _corrected(answer: bytes, cached_tokens: int) -> bytes:
    """The number is the one whose change changes what a JSON reader finds in the usage: no text can pass for it."""
    if _told(answer) in (None, cached_tokens):
        return answer
    for said in _SAID.finditer(answer):
        changed = b"%b%d%b" % (answer[: said.start(1)], cached_tokens, answer[said.end(1) :])
        if _told(changed) == cached_tokens:
            return changed
    return answer


def _told(answer: bytes) -> int | None:
    found = decode(answer, _Answer)
    return found.usage.cached_tokens if found and found.usage else None
