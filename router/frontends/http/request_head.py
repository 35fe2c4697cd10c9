"""Does the head of a request have one meaning?

Pure checks that `httptools` leaves to its user. A head that another proxy could read differently is an error, because
that proxy would find other requests in the same bytes (request smuggling). This module reads no body.
"""

from __future__ import annotations

from collections.abc import Mapping

import httptools

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
