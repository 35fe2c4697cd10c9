"""Counts the tokens of texts that engines embed, classify, score or rank.

Most share no prefix that is worth a pod: many of these models cache none, and one query's pairs share it only inside
one request. So their number is all that is read, except for one text to embed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from router.apis.body_types import CHANGING_FIELDS, FIRST_FIELDS, SECOND_FIELDS, TEXT_FIELDS
from router.prompt.conversation import UnreadReason, Unrenderable

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
