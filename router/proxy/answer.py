"""What can be learnt from an answer while it passes through?

When the first token came, and how many prompt tokens the engine found in its cache. Reads a copy of the bytes: nothing
here changes, delays or re-frames what the client gets.
"""

from __future__ import annotations

import re

import msgspec

# The first chat chunk carries only a role and an empty content: it is not the first token.
_FIRST_TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)": ?"[^"]')
# Quotes inside generated text are escaped in JSON, so that a model cannot write these patterns into its answer.
_CACHED = re.compile(rb'"cached_tokens": ?(\d{1,12})\b')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d{1,12})\b')
_OUTPUT = re.compile(rb'"completion_tokens": ?(\d{1,12})\b')
_USAGE = re.compile(rb'"usage": ?\{')
_USAGE_SIGN = b'"usage"'
_LONGEST_USAGE_BYTES = 16
"""No match of `_USAGE` is longer, and none has a line's end in it."""
_WINDOW_BYTES = 4096
"""How much of an answer is kept: longer than any usage object."""
_SEARCH_BYTES = 64 * 1024
"""After so much of an answer its first token must have been there, whatever it looks like."""
_LONGEST_SIGN_BYTES = 32
"""No match of `_FIRST_TOKEN` is longer."""


class AnswerReader(msgspec.Struct, gc=False):
    """Fed with every piece of one answer, in order."""

    has_token: bool = False
    _searched_bytes: int = 0
    _head: bytes = b""
    _tail: bytes = b""
    _usage: bytes = b""

    def feed(self, piece: bytes) -> bool:
        """Take one piece. True exactly once: when it brings the first token."""
        if self._tail or self._usage or _USAGE_SIGN in piece or not piece.endswith(b"\n"):
            self._look_for_usage(piece)
        return not self.has_token and self._look_for_token(piece)

    def _look_for_token(self, piece: bytes) -> bool:
        window = self._head + piece
        self._searched_bytes += len(piece)
        self.has_token = self._searched_bytes > _SEARCH_BYTES or _FIRST_TOKEN.search(window) is not None
        self._head = b"" if self.has_token else window[-_LONGEST_SIGN_BYTES:]
        return self.has_token

    def _look_for_usage(self, piece: bytes) -> None:
        """Keep the last usage object and what follows it; it may be cut across pieces, and need not come last."""
        window = self._tail + piece
        at = window.rfind(_USAGE_SIGN)
        while at >= 0 and not _USAGE.match(window, at):  # null, in a later chunk
            at = window.rfind(_USAGE_SIGN, 0, at)
        if at >= 0:
            self._usage = window[at : at + _WINDOW_BYTES]
        elif self._usage and len(self._usage) < _WINDOW_BYTES:
            self._usage += piece
        self._tail = b"" if window.endswith(b"\n") else window[-_LONGEST_USAGE_BYTES:]

    @property
    def cached_tokens(self) -> int | None:
        """What the engine's usage said, or None when it did not say."""
        return _first_int(_CACHED, self._usage)

    @property
    def prompt_tokens(self) -> int | None:
        """The engine's own count of prompt tokens, or None."""
        return _first_int(_PROMPT, self._usage)

    @property
    def output_tokens(self) -> int | None:
        """The engine's own count of tokens in the answer, or None."""
        return _first_int(_OUTPUT, self._usage)


def _first_int(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None
