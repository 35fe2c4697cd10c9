"""Reads the prompt of a completion: text, or a list of token ids."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from router.errors import MalformedRequest
from router.hashing import token_array

SLICE_BYTES = 1 << 16
"""Bytes of a list that are decoded at once."""


class TokenIds:
    """Decodes long lists of ids below `vocabulary_size` in slices: a million ids in one call would hold the interpreter
    for 20 ms."""

    def __init__(self, vocabulary_size: int) -> None:
        self._ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=vocabulary_size)]])

    def read(self, listed: memoryview) -> array[int]:
        """The ids of a JSON list, which begins with `[`. `ValueError` or `RecursionError` for anything else."""
        ids, inner, start = token_array(), listed[1:-1], 0
        while start < len(inner):
            piece = inner[start : start + SLICE_BYTES].tobytes()
            if start + SLICE_BYTES < len(inner):
                piece = piece[: piece.rindex(b",")]
            ids.extend(self._ids.decode(b"[%b]" % piece))
            start += len(piece) + 1
        return ids


class CompletionPrompts:
    def __init__(self, vocabulary_size: int) -> None:
        self._ids = TokenIds(vocabulary_size)

    def read(self, prompt: Any) -> str | array[int]:
        """A completion's prompt, raw or decoded; of several, the first. Raises `MalformedRequest`."""
        try:
            first = _first(prompt)
            if _starts(first, b'"'):
                return msgspec.json.decode(first, type=str)
            if _starts(first, b"[") and _second(first).isdigit():
                return self._ids.read(first)
        except (ValueError, RecursionError) as error:
            raise MalformedRequest(f"prompt is not valid: {error}", param="prompt") from error
        raise MalformedRequest("prompt must be a string, a list of token ids, or a list of these", param="prompt")


def number_of_prompts(prompt: msgspec.Raw) -> int:
    """How many prompts there are in the raw prompt of a completion. Nothing is decoded: a list of token ids is one, in
    a list of lists each begins with a bracket, and in one of texts each has two quotes that are not escaped."""
    raw = memoryview(prompt)
    second = _second(raw) if _starts(raw, b"[") else b""
    if second == b"[":
        return raw.tobytes().count(b"[") - 1
    if second == b'"':
        text = raw.tobytes().replace(b"\\\\", b"")
        return (text.count(b'"') - text.count(b'\\"')) // 2
    return 1


def first_text(prompt: Any) -> str | None:
    """The text of a completion's prompt, raw or decoded, or of the first of several; None for anything else."""
    try:
        return msgspec.json.decode(_first(prompt), type=str)
    except (ValueError, RecursionError):
        return None


def _first(prompt: Any) -> memoryview:
    """The JSON of the first of several prompts, or of the only one."""
    raw = memoryview(prompt if isinstance(prompt, msgspec.Raw) else msgspec.json.encode(prompt))
    if _starts(raw, b"[") and _second(raw) in (b'"', b"["):
        return memoryview(msgspec.json.decode(raw, type=list[msgspec.Raw])[0])
    return raw


def _starts(value: memoryview, character: bytes) -> bool:
    return value[:1].tobytes() == character


def _second(listed: memoryview) -> bytes:
    """The first character of a list's first item."""
    return listed[1:SLICE_BYTES].tobytes().lstrip()[:1]
