"""Corrects `cached_tokens` in the usage that a client receives when two pods served its request.

A decode pod counts the KV that it received as cached, or not at all; only the prefill pod's own cache saved work. Where
the engine reports `usage.prompt_tokens_details.cached_tokens`, the number is replaced; no other byte changes.
"""

from __future__ import annotations

import re

import msgspec

from router.engines.adapter import Usage, decode
from router.guards import Bound

MAX_HELD_BYTES = 1024 * 1024
"""A longer response, or line of a stream, is not corrected."""
MAX_TRIES = 4
"""The usage is at the end: of more places with the key, the last ones are tried."""
_RESPONSE = Bound("response", MAX_HELD_BYTES, counted=b"")
_NUMBER = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_KEY = b'"cached_tokens"'
_DATA = b"data:"


class _WithUsage(msgspec.Struct):
    usage: Usage | None = None


class UsageCorrection:
    """Corrects one response, chunk by chunk; `end` returns a response that is not a `stream`. With `cached_tokens` None
    nothing changes."""

    def __init__(self, cached_tokens: int | None, stream: bool) -> None:
        self._cached_tokens = cached_tokens
        self._stream = stream
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        if self._cached_tokens is None:
            return chunk
        end = chunk.rfind(b"\n") + 1 if self._stream else 0
        if not end:
            self._held += chunk
            if len(self._held) <= MAX_HELD_BYTES:
                return b""
            self._cached_tokens = None
            return self.end()
        lines = bytes(self._held) + chunk[:end]
        self._held = bytearray(chunk[end:])
        return _corrected_lines(lines, self._cached_tokens)

    def end(self) -> bytes:
        rest, self._held = bytes(self._held), bytearray()
        if self._cached_tokens is None:
            return rest
        correct = _corrected_lines if self._stream else _corrected
        return correct(rest, self._cached_tokens)


def _corrected_lines(lines: bytes, cached_tokens: int) -> bytes:
    if _KEY not in lines:
        return lines
    return b"\n".join(
        _DATA + _corrected(line.removeprefix(_DATA), cached_tokens) if line.startswith(_DATA) else line
        for line in lines.split(b"\n")
    )


def _corrected(response: bytes, cached_tokens: int) -> bytes:
    """Replaces the number in the usage, as a JSON reader sees it; the same text elsewhere stays."""
    if _reported(response) in (None, cached_tokens):
        return response
    at = len(response)
    for _ in range(MAX_TRIES):
        at = max(response.rfind(_KEY, 0, at), 0)
        if (found := _NUMBER.match(response, at)) is None:
            continue
        changed = b"%b%d%b" % (response[: found.start(1)], cached_tokens, response[found.end(1) :])
        if _reported(changed) == cached_tokens:
            return changed
    return response


def _reported(response: bytes) -> int | None:
    found = decode(response, _WithUsage, _RESPONSE)
    return found.usage.cached_tokens if found and found.usage else None
