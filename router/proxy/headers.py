"""Which headers go on to the pod, and which come back?

Pure: header lists in, header lists and request heads out. Hop-by-hop headers never pass (RFC 9110 7.6.1), headers that
steer an engine pass only from trusted clients. This file never reads a body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.errors import MalformedRequest

HeaderList = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

ENGINE_CONTROL = frozenset(
    {
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
        b"x-override-bootstrap-host",
        b"x-override-bootstrap-port",
        b"x-override-bootstrap-room",
        b"x-override-rid",
        b"x-override-routed-dp-rank",
        b"x-override-disagg-prefill-dp-rank",
    }
)
"""With these a client could send KV, or make an engine fetch it, from anywhere."""

# Recomputed for the upstream exchange; accept-encoding is dropped because a compressed stream cannot be observed and
# would be held back by the compressor.
_REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id", b"x-forwarded-for"})
_NOT_UPSTREAM = HOP_BY_HOP | _REWRITTEN
_NOT_UPSTREAM_UNTRUSTED = _NOT_UPSTREAM | ENGINE_CONTROL
_NOT_DOWNSTREAM = HOP_BY_HOP | {b"date", b"server", b"x-request-id"}


def upstream_headers(headers: HeaderList, *, trusted: bool) -> HeaderList:
    """The client's headers as a pod may see them."""
    dropped = _NOT_UPSTREAM if trusted else _NOT_UPSTREAM_UNTRUSTED
    if b"connection" in dict(headers):
        dropped |= _named_by_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def downstream_headers(headers: HeaderList) -> HeaderList:
    """The pod's headers as the client may see them."""
    dropped = _NOT_DOWNSTREAM
    if b"connection" in dict(headers):
        dropped |= _named_by_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def request_message(method: str, target: bytes, host: bytes, headers: HeaderList, body: bytes) -> bytes:
    """One whole HTTP/1.1 request. Raises `MalformedRequest` where target or headers would end a line on their own."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + host, *map(b": ".join, headers)]
    if body or method not in ("GET", "DELETE"):
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join(lines)
    if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
        raise MalformedRequest("The path or a header has a line break in it.")
    return head + b"\r\n\r\n" + body


def first_values(headers: HeaderList) -> Mapping[bytes, bytes]:
    """The first value of each name, for whoever asks for several."""
    return dict(reversed(headers))


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """First value of a header, or ""."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""


def _named_by_connection(headers: HeaderList) -> set[bytes]:
    """What the sender has declared to be hop-by-hop."""
    tokens = b",".join([value for name, value in headers if name == b"connection"]).split(b",")
    return {token.strip().lower() for token in tokens}
