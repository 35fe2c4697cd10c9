"""Removes the `uuid` that a client gives a picture, sound or video.

vLLM uses it as the item's identifier, and looks its caches of pictures up by that alone, without the salt: a client
could read or replace what the engine has made of another tenant's picture. Nothing else in a body changes.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec

from router.errors import DECODE_ERRORS, MalformedRequest, not_json
from router.prompt.media import KINDS

_KEY = re.compile(rb'"(?:u|\\u0075){2}(?:i|\\u0069)(?:d|\\u0064)"')
"""The name, also with escapes."""
_OBJECT_BEGINS = re.compile(rb"\s*\{")
SEARCHED_BYTES = 128 * 1024
"""Searched at once: a millisecond, where a client has filled them with quotes."""
MAX_DEPTH = 6
"""Body, messages, one conversation of several, message, content, part. Tools and arguments of calls are deeper."""
_LISTS_OF_PARTS = frozenset({"content", "output", "content_parts"})
_UUID = "uuid"
_NULL = msgspec.Raw(b"null")
_EMPTY = (b"null", b'""', b"{}", b"[]")
_CONTENT = frozenset(KINDS) | {"url"}
_OPTIONS = ("detail", "format")
"""Fields of an item that say how to read it."""
_RawFields: TypeAlias = dict[str, msgspec.Raw]
_OBJECT = msgspec.json.Decoder(_RawFields)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


def may_have_uuid(body: bytes | memoryview) -> bool:
    """Whether a body may have the field. Takes 0.3 to 9 ns a byte."""
    return _KEY.search(body) is not None


def without_uuids(body: bytes) -> bytes:
    """The body without the field in its pictures, sounds and videos; the same object if it has none. Raises
    `MalformedRequest` for one that is only a reference to the engine's cache."""
    if _OBJECT_BEGINS.match(body) is None:
        return body
    try:
        cleaned = _cleaned_object(_OBJECT.decode(body), "", MAX_DEPTH, is_part=False)
    except DECODE_ERRORS as error:
        raise not_json(error, body) from error
    return body if cleaned is None else bytes(cleaned)


def _cleaned(value: msgspec.Raw, path: str, levels: int, *, is_part: bool = False) -> msgspec.Raw | None:
    """The value without the field; None if nothing changes."""
    view = memoryview(value)
    first = bytes(view[:1])
    if not levels or first not in (b"[", b"{") or (len(view) <= SEARCHED_BYTES and not may_have_uuid(view)):
        return None
    if first == b"[":
        items = _LIST.decode(value)
        changed = {
            number: cleaned
            for number, item in enumerate(items)
            if (cleaned := _cleaned(item, f"{path}[{number}]", levels - 1, is_part=is_part)) is not None
        }
        kept = [changed.get(number, item) for number, item in enumerate(items)]
        return msgspec.Raw(msgspec.json.encode(kept)) if changed else None
    return _cleaned_object(_OBJECT.decode(value), path, levels, is_part=is_part)


def _cleaned_object(fields: _RawFields, path: str, levels: int, *, is_part: bool) -> msgspec.Raw | None:
    changed = {
        name: cleaned
        for name, inner in fields.items()
        if (cleaned := _cleaned(inner, f"{path}.{name}".lstrip("."), levels - 1, is_part=_has_parts(name, inner)))
        is not None
    }
    is_named = is_part and fields.get(_UUID, _NULL) != _NULL and _is_media(fields)
    if is_named and not any(_is_given(fields[name]) for name in _CONTENT & fields.keys()):
        raise MalformedRequest(
            "A `uuid` without its picture, sound or video refers to the cache of an engine, which clients may not use "
            "(edge.trust_engine_fields). Send the content.",
            param=f"{path}.{_UUID}",
        )
    if not changed and not is_named:
        return None
    kept = {name: changed.get(name, inner) for name, inner in fields.items() if not (is_named and name == _UUID)}
    return msgspec.Raw(msgspec.json.encode(kept))


def _has_parts(name: str, value: msgspec.Raw) -> bool:
    return name in _LISTS_OF_PARTS and bytes(memoryview(value)[:1]) == b"["


def _is_media(fields: _RawFields) -> bool:
    """Whether an engine may read the part as a picture, sound or video: with a `uuid`, by its other fields alone."""
    if not KINDS.keys().isdisjoint(fields):
        return True
    try:
        return _TEXT.decode(fields["type"]) in KINDS if "type" in fields else False
    except msgspec.ValidationError:
        return False


def _is_given(value: msgspec.Raw) -> bool:
    view = memoryview(value)
    if bytes(view[:1]) == b"{":
        inner = _OBJECT.decode(value)
        return any(bytes(memoryview(inner[name])[:5]) not in _EMPTY for name in inner if name not in _OPTIONS)
    return bytes(view[:5]) not in _EMPTY
