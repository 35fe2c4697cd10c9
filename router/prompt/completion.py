"""Reads the prompt of a completion: text, or a list of token ids. Counts the tokens of texts that engines embed,
classify, score or rank.

Most of these share no prefix that is worth a pod: many of these models cache none, and one query's pairs share it only
inside one request. So their number is all that is read, except for one text to embed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from router.apis.body_types import CHANGING_FIELDS, FIRST_FIELDS, SECOND_FIELDS, TEXT_FIELDS
from router.errors import MalformedRequest
from router.hashing import token_array
from router.prompt.conversation import UnreadReason, Unrenderable

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


def is_listed(prompt: Any) -> bool:
    """Whether a raw prompt is a list of prompts, also of one."""
    raw = memoryview(prompt) if isinstance(prompt, msgspec.Raw) else memoryview(b"")
    return _starts(raw, b"[") and _second(raw) in (b'"', b"[")


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


# --- texts ---


MAX_TEXT_BYTES = 256 * 1024
"""Longer ones are not read: their tokens are estimated well enough from the body."""

CountTexts: TypeAlias = Callable[[Sequence[str]], Sequence[int]]


class _Document(msgspec.Struct):
    text: str


_TEXTS = msgspec.json.Decoder(str | list[msgspec.Raw])
_ITEM = msgspec.json.Decoder(str | _Document)


def count_tokens(fields: Mapping[str, msgspec.Raw], count: CountTexts) -> int:
    """Tokens that the engine computes for a body with these `TEXT_FIELDS`. Raises `Unrenderable` for other items than
    texts and token ids."""
    try:
        lengths = {name: list(_lengths(raw, count)) for name, raw in fields.items() if name in TEXT_FIELDS}
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise Unrenderable(UnreadReason.MEDIA, f"not texts: {error}") from error
    first, second = ([n for name in names for n in lengths.get(name, ())] for names in (FIRST_FIELDS, SECOND_FIELDS))
    repeated = len(second) if len(first) == 1 and second else 1
    return sum(lengths.get("input", ())) + sum(first) * repeated + sum(second)


def only_text(fields: Mapping[str, Any]) -> Any:
    """The text of embeddings of only one, raw or decoded, whose tokens are those of a completion; None for others."""
    text = fields.get("input")
    is_raw = isinstance(text, msgspec.Raw) and bytes(memoryview(text)[:1]) == b'"'
    is_alone = fields.keys().isdisjoint((*CHANGING_FIELDS, *FIRST_FIELDS, *SECOND_FIELDS))
    return text if is_alone and (is_raw or isinstance(text, str)) else None


def size_bytes(fields: Mapping[str, msgspec.Raw]) -> int:
    return sum(len(memoryview(raw)) for raw in fields.values())


def _lengths(raw: msgspec.Raw, count: CountTexts) -> Iterator[int]:
    """The length of each item of a field, in tokens. Ids are counted and not decoded."""
    start = bytes(memoryview(raw)[:64])
    if start[:1] == b"[" and start[1:].lstrip()[:1].isdigit():
        yield _id_count(raw)
        return
    given = _TEXTS.decode(raw)
    items = [given] if isinstance(given, str) else given
    texts = []
    for item in items:
        if isinstance(item, msgspec.Raw) and bytes(memoryview(item)[:1]) == b"[":
            yield _id_count(item)
        else:
            text = _ITEM.decode(item) if isinstance(item, msgspec.Raw) else item
            texts.append(text if isinstance(text, str) else text.text)
    yield from count(texts)


def _id_count(raw: msgspec.Raw) -> int:
    return bytes(memoryview(raw)).count(b",") + 1
