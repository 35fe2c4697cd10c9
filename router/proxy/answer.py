"""What can be learnt from an answer while it passes through?

When the first token came, how many prompt tokens the engine found in its cache, whether the stream ended as it should.
Reads a copy of the bytes: nothing here changes, delays or re-frames what the client gets.
"""

from __future__ import annotations

import re

# The first chat chunk carries only a role and an empty content: it is not the first token.
_FIRST_TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)": ?"[^"]')
# Quotes inside generated text are escaped in JSON, so that a model cannot write these patterns into its answer.
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')
_USAGE = b'"usage":{'
_TAIL_BYTES = 4096
_SEARCH_BYTES = 64 * 1024


class AnswerReader:
    """Fed with every piece of one answer, in order."""

    def __init__(self) -> None:
        self.bytes = 0
        self.has_token = False
        self._head = b""
        self._tail = b""
        self._usage = b""

    def feed(self, piece: bytes) -> bool:
        """Take one piece. True exactly once: when it brings the first token."""
        self.bytes += len(piece)
        self._tail = piece[-_TAIL_BYTES:] if len(piece) >= _TAIL_BYTES else (self._tail + piece)[-_TAIL_BYTES:]
        if _USAGE in piece:  # an unstreamed answer may go on behind it for long: prompt_token_ids
            at = piece.rindex(_USAGE)
            self._usage = piece[at : at + _TAIL_BYTES]
        if self.has_token:
            return False
        return self._look_for_token(piece)

    def _look_for_token(self, piece: bytes) -> bool:
        self._head += piece
        self.has_token = len(self._head) > _SEARCH_BYTES or _FIRST_TOKEN.search(self._head) is not None
        if self.has_token:
            self._head = b""
        return self.has_token

    @property
    def cached_tokens(self) -> int | None:
        """What the engine's usage said, or None when it did not say."""
        return _last_int(_CACHED, self._tail) or _last_int(_CACHED, self._usage)

    @property
    def prompt_tokens(self) -> int | None:
        """The engine's own count of prompt tokens, or None."""
        return _last_int(_PROMPT, self._tail) or _last_int(_PROMPT, self._usage)


def _last_int(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
