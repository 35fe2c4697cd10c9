"""Reads the first token and the usage of a response while it passes through.

Works on a copy of the bytes: the response is neither changed nor delayed.
"""

from __future__ import annotations

import re

import msgspec

# The first chat chunk carries only a role and an empty content: it is not the first token.
_FIRST_TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)": ?"[^"]')
# Quotes inside generated text are escaped in JSON, so a model cannot generate these patterns.
_CACHED = re.compile(rb'"cached_tokens": ?(\d{1,12})\b')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d{1,12})\b')
_OUTPUT = re.compile(rb'"completion_tokens": ?(\d{1,12})\b')
_USAGE = re.compile(rb'"usage": ?\{')
_USAGE_KEY = b'"usage"'
_MAX_USAGE_KEY_BYTES = 16
"""No match of `_USAGE` is longer, and none contains a newline."""
_WINDOW_BYTES = 4096
"""Maximum number of bytes kept of a usage object."""
_SEARCH_BYTES = 64 * 1024
"""After this many bytes a response without a recognized token counts as begun."""
_MAX_TOKEN_KEY_BYTES = 32
"""No match of `_FIRST_TOKEN` is longer."""


class ResponseReader(msgspec.Struct, gc=False):
    """Reads one response; feed it every piece, in order."""

    has_token: bool = False
    _searched_bytes: int = 0
    _head: bytes = b""
    _tail: bytes = b""
    _usage: bytes = b""

    def feed(self, piece: bytes) -> bool:
        """Read one piece. Returns True once: for the piece with the first token."""
        if self._tail or self._usage or _USAGE_KEY in piece or not piece.endswith(b"\n"):
            self._look_for_usage(piece)
        return not self.has_token and self._look_for_token(piece)

    def _look_for_token(self, piece: bytes) -> bool:
        window = self._head + piece
        self._searched_bytes += len(piece)
        self.has_token = self._searched_bytes > _SEARCH_BYTES or _FIRST_TOKEN.search(window) is not None
        self._head = b"" if self.has_token else window[-_MAX_TOKEN_KEY_BYTES:]
        return self.has_token

    def _look_for_usage(self, piece: bytes) -> None:
        """Keep the last usage object and what follows. It may be split across pieces, and events may follow it."""
        window = self._tail + piece
        at = window.rfind(_USAGE_KEY)
        while at >= 0 and not _USAGE.match(window, at):  # null in later chunks
            at = window.rfind(_USAGE_KEY, 0, at)
        if at >= 0:
            self._usage = window[at : at + _WINDOW_BYTES]
        elif self._usage and len(self._usage) < _WINDOW_BYTES:
            self._usage += piece
        self._tail = b"" if window.endswith(b"\n") else window[-_MAX_USAGE_KEY_BYTES:]

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens of the engine's usage, or None."""
        return _first_int(_CACHED, self._usage)

    @property
    def prompt_tokens(self) -> int | None:
        return _first_int(_PROMPT, self._usage)

    @property
    def output_tokens(self) -> int | None:
        return _first_int(_OUTPUT, self._usage)


def _first_int(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None
