"""Reads the first token and the usage of a response while it passes through.

Works on a copy of the bytes: the response is neither changed nor delayed.
"""

from __future__ import annotations

import re

import msgspec

from router.apis.api import CHAT_FORMAT, ResponseFormat
from router.types import Endpoint

_ERROR_EVENT = re.compile(rb'^data: ?\{"error"', re.MULTILINE)
_USAGE = re.compile(rb'"usage": ?\{')
_USAGE_KEY = b'"usage"'
_MAX_USAGE_KEY_BYTES = 16
"""No match of `_USAGE` is longer, and none contains a newline."""
_MAX_USAGE_KEYS = 1000
"""Only the last keys in a piece are looked at."""
_WINDOW_BYTES = 4096
"""Maximum number of bytes kept of a usage object."""
_SEARCH_BYTES = 64 * 1024
"""After this many bytes a response without a recognized token counts as begun."""
_MAX_TOKEN_KEY_BYTES = 64
"""No match of a pattern for the first token is longer."""


def has_early_error(stream: bytes) -> bool:
    """Whether an error is among the first events of a stream."""
    return _ERROR_EVENT.search(stream, 0, _SEARCH_BYTES) is not None


class ResponseReader(msgspec.Struct, gc=False):
    """Reads one response; feed it every piece, in order."""

    format: ResponseFormat = CHAT_FORMAT
    pieces: int = 0
    """Number of pieces so far."""
    size_bytes: int = 0
    has_token: bool = False
    _searched_bytes: int = 0
    _head: bytes = b""
    _tail: bytes = b""
    _usage: bytes = b""
    _first_usage: bytes = b""
    """The first usage of a stream; what later ones omit is read from it."""
    _is_stream: bool = False
    _is_opaque: bool = False
    """Whether the body has neither events nor a JSON object: then its first byte counts as its first token."""
    in_preamble: bool = False
    """Whether the stream has only sent events that precede the prefill."""
    is_marked: bool = False
    """Whether the last piece has usage, or a part of a line."""
    response_id: str = ""
    """The id of the response, if its format has one."""

    def begin(self, *, is_opaque: bool) -> None:
        """A pod has begun to respond, maybe after another one that failed."""
        self._is_opaque, self.has_token, self._searched_bytes, self._head = is_opaque, False, 0, b""

    def feed(self, piece: bytes) -> bool:
        """Read one piece. Returns True once: for the piece with the first token."""
        self.pieces += 1
        self.size_bytes += len(piece)
        if not self._searched_bytes:
            self._begin(piece)
        self.is_marked = piece.rfind(_USAGE_KEY) >= 0 or not piece.endswith(b"\n")  # three times as fast as `in`
        if self.is_marked or self._tail or self._usage:
            self._look_for_usage(piece)
        return not self.has_token and self._look_for_token(piece)

    def _begin(self, piece: bytes) -> None:
        self._is_stream = not piece.lstrip().startswith(b"{")
        if self.format.preamble is not None:
            self.in_preamble = self.format.preamble.match(piece) is not None
        if self.format.id is not None and (found := self.format.id.search(piece, 0, _WINDOW_BYTES)):
            self.response_id = found[1].decode()

    def _look_for_token(self, piece: bytes) -> bool:
        window = self._head + piece
        self._searched_bytes += len(piece)
        if self._is_opaque or (self.format.preamble is not None and not self._is_stream):
            self.has_token = True
        else:
            is_long = self._searched_bytes > _SEARCH_BYTES and not self.in_preamble
            self.has_token = is_long or self.format.first_token.search(window) is not None
        self.in_preamble = self.in_preamble and not self.has_token
        self._head = b"" if self.has_token else window[-_MAX_TOKEN_KEY_BYTES:]
        return self.has_token

    def _look_for_usage(self, piece: bytes) -> None:
        """Keep the last usage object and what follows. It may be split across pieces, and events may follow it."""
        window = self._tail + piece
        at, tries = window.rfind(_USAGE_KEY), 1
        while at >= 0 and not (found := _USAGE.match(window, at)) and tries < _MAX_USAGE_KEYS:  # null in later chunks
            at, tries = window.rfind(_USAGE_KEY, 0, at), tries + 1
        if at >= 0 and found and found.end() > len(self._tail):  # else it was found before
            if self._is_stream and not self._first_usage:
                first = _USAGE.search(window)
                self._first_usage = self._usage or (window[first.start() : at] if first else b"")
            self._usage = window[at : at + _WINDOW_BYTES]
        elif self._usage and len(self._usage) < _WINDOW_BYTES:
            self._usage += piece
        self._tail = b"" if window.endswith(b"\n") else window[-_MAX_USAGE_KEY_BYTES:]

    @property
    def cached_tokens(self) -> int | None:
        return self._reported(self.format.cached)

    @property
    def prompt_tokens(self) -> int | None:
        first, *others = self.format.prompt
        length = self._reported(first)
        if length is not None:
            for pattern in others:
                length += self._reported(pattern) or 0
        return length

    @property
    def output_tokens(self) -> int | None:
        return self._reported(self.format.output)

    def _reported(self, pattern: re.Pattern[bytes]) -> int | None:
        found = pattern.search(self._usage) or pattern.search(self._first_usage)
        return int(found[1]) if found else None


_TOKENS = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|arguments|thinking|partial_json|delta)": ?"[^"]'
    rb'|"delta": ?\{"content": ?""|\{(?:"index": ?\d+, ?)?"text": ?""'
)


class TokenCountingReader(ResponseReader, gc=False):
    """Also counts the events of a stream that have text, or an empty one: that is how vLLM sends tokens which it holds
    back, because they may begin a stop string or end within a character. Engines send one event for each token, but
    where several become ready at once."""

    tokens: int = 0

    def feed(self, piece: bytes) -> bool:
        self.count(piece)
        return ResponseReader.feed(self, piece)

    def count(self, piece: bytes) -> None:
        self.tokens += len(_TOKENS.findall(piece))


def reader_of(endpoint: Endpoint) -> ResponseReader:
    return ResponseReader(endpoint.api.response)
