"""Does the head of a request have one meaning?

Pure checks that `httptools` leaves to its user. A head that another proxy could read differently is an error, because
that proxy would find other requests in the same bytes (request smuggling), or another path (RFC 3986 6.2, 7.3): a path
is never decoded here. This module reads no body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import httptools

from router.engines.forwarded_paths import meant_hint
from router.errors import MalformedRequest, RouterError
from router.request.inbound import HeaderList


def check_head(version: str, headers: HeaderList, named: Mapping[bytes, bytes]) -> None:
    """Raise `MalformedRequest` where host or length are ambiguous (RFC 9112, 3.2 and 6.1). `named`: the first value of
    each name."""
    if version == "1.1":
        if b"host" not in named:
            raise MalformedRequest("The Host header is missing; HTTP/1.1 requires exactly one.")
    elif version != "1.0":
        raise MalformedRequest(f"HTTP/{version} is not supported; use HTTP/1.1.")
    if b"transfer-encoding" in named:
        if version == "1.0":
            raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding; send a Content-Length.")
        if named[b"transfer-encoding"].strip().lower() != b"chunked":
            raise MalformedRequest("The only supported Transfer-Encoding is chunked.")
    if len(named) != len(headers) and sum(name == b"host" for name, _ in headers) > 1:
        raise MalformedRequest("There are several Host headers; HTTP/1.1 requires exactly one.")


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: HeaderList) -> bytes:
    """The same head without its Upgrade headers. The values were parsed, so they contain no line break."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


def parse_refusal(error: httptools.HttpParserError) -> RouterError:
    """What to answer when parsing failed: the error that a callback raised, or what the parser found."""
    cause = error.__context__
    if isinstance(cause, RouterError):
        return cause
    return MalformedRequest(f"Invalid HTTP request: {error if cause is None else 'its target is no path or URL'}.")


MAX_SHOWN_CHARACTERS = 80

_AMBIGUOUS = re.compile(
    r"""
    (?P<a_backslash>\\) | (?P<an_empty_segment>//) | (?P<a_dot_segment>/\.{1,2}(?:[/;]|$))
    | (?P<a_percent_sign_that_encodes_nothing>%(?![0-9a-f]{2}))
    | (?P<an_encoded_slash_or_percent_sign_or_control_byte>%(?:[01][0-9a-f]|25|2f|5c|7f|c[01]))
    | (?P<an_encoded_character_that_needs_no_encoding>%(?:2[de]|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9ae]))
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NAMES_WITH_SLASHES = ("/v1/models/", "/admin/")
"""Paths of the router's own that end with a name, in which clients encode slashes."""


class RequestTarget(NamedTuple):
    """Path and query as sent. `fault` says why the target is refused; "" if it is not."""

    path: str
    raw: bytes
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
    if (found := _AMBIGUOUS.search(checked)) is None:
        return ""
    hint = meant_hint(path) or " Send the plain path of the endpoint."
    return f"The path {shown(path)!r} is ambiguous: it has {str(found.lastgroup).replace('_', ' ')}.{hint}"
