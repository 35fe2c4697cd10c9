"""Splits the target of a request into path and query, and refuses targets that two parsers may read differently.

A proxy that compares one reading of a path while the server behind it acts on another one is open to all paths
(RFC 3986 6.2, 7.3). A path is therefore never decoded here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import httptools

MAX_SHOWN_CHARACTERS = 80
"""A longer path is shortened in error messages."""

_AMBIGUOUS = re.compile(
    r"""
    \\ | // | /\.{1,2}(?:[/;]|$)                                # backslash, empty segment, dot segment
    | %(?![0-9a-f]{2}) | %(?:[01][0-9a-f]|25|2f|5c|7f|c[01])    # invalid; encoded control byte, percent, slash
    | %(?:2[de]|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9ae])   # an encoded character that needs no encoding
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NAMES_WITH_SLASHES = ("/v1/models/", "/admin/")
"""Paths of the router's own that end with a name, in which clients encode slashes."""


class RequestTarget(NamedTuple):
    """Path and query as sent. `fault` says why the target is refused; "" if it is not."""

    path: str
    raw: bytes
    """Path and query."""
    fault: str


@lru_cache(maxsize=64)
def read_target(url: bytes) -> RequestTarget:
    """The target of a request line. Raises `HttpParserError`, also for bytes that are not visible ASCII."""
    parts = httptools.parse_url(url)
    raw = parts.path + b"?" + parts.query if parts.query else parts.path
    path = parts.path.decode("ascii")
    return RequestTarget(path, raw, _fault(path))


def shown(path: str) -> str:
    """The path for a message, bounded and printable."""
    cut = path if len(path) <= MAX_SHOWN_CHARACTERS else f"{path[:MAX_SHOWN_CHARACTERS]}..."
    return cut.encode("ascii", "backslashreplace").decode()


def _fault(path: str) -> str:
    checked = re.sub("%2f", "/", path, flags=re.IGNORECASE) if path.startswith(_NAMES_WITH_SLASHES) else path
    if not _AMBIGUOUS.search(checked):
        return ""
    return (
        f"The path {shown(path)!r} is ambiguous: it has a dot segment, an empty segment, a backslash, "
        "or a character that must not be encoded. Send the plain path of the endpoint."
    )
