"""Refuses forms that have fields which steer the engine.

Forms are forwarded unread, because they carry audio and images. A part's header is one line; any line that looks like
one is checked, also inside a file, and must be plain, so that no reading of it differs from the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from router.engines.steering import CONTAINERS, STEERING_FIELDS
from router.errors import MalformedRequest

MAX_FIELDS = 1000
"""As many as the engines' parser accepts."""

_PART = b"content-disposition"
_PLAIN = re.compile(
    rb'[ \t]*:[ \t]*form-data[ \t]*;[ \t]*name="?([\w.\[\]-]*)"?'
    rb"""(?:[ \t]*;[ \t]*filename\*?=(?:"(?:[^"\\\r\n]|\\[^\r\n])*"|[\w.%'-]*))*[ \t]*""",
    re.IGNORECASE,
)
_LINE_END = re.compile(rb"[\r\n]|\Z")
_REFUSED = frozenset(name.encode() for name in STEERING_FIELDS | CONTAINERS)


def check_form(body: bytes, content_type: bytes) -> None:
    """Raises `MalformedRequest` for a field that steers the engine, or for a part whose name parsers may read in two
    ways. `content_type`: as the client sent it."""
    names = _urlencoded_names(body) if b"urlencoded" in content_type.lower() else _part_names(body)
    for number, name in enumerate(names):
        if number >= MAX_FIELDS:
            raise MalformedRequest(f"The form has more than {MAX_FIELDS} fields.")
        if name is None:
            raise MalformedRequest('A part of the form has an unusual content-disposition; send name="..." as is.')
        base = name.partition(b"[")[0]
        if base in _REFUSED:
            field = base.decode()
            raise MalformedRequest(
                f"The form field `{field}` steers the engine and is accepted only from trusted clients "
                "(edge.trust_engine_fields).",
                param=field,
            )


def _part_names(body: bytes) -> Iterator[bytes | None]:
    """The names of all parts; None for one that is not plain."""
    lowered = body.lower()
    at = lowered.find(_PART)
    while at >= 0:
        end = at + len(_PART)
        if at == 0 or body[at - 1] in b"\r\n":
            line = body[end : _line_end(body, end)]
            plain = _PLAIN.fullmatch(line)
            yield plain[1] if plain else None
        at = lowered.find(_PART, end)


def _line_end(body: bytes, start: int) -> int:
    found = _LINE_END.search(body, start)
    return found.start() if found else len(body)


def _urlencoded_names(body: bytes) -> Iterator[bytes]:
    for pair in body.replace(b";", b"&").split(b"&", MAX_FIELDS):
        yield unquote_to_bytes(pair.partition(b"=")[0].replace(b"+", b" "))
