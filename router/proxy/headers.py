"""Which headers are sent to the pod, and which to the client?

Hop-by-hop headers never pass (RFC 9110 7.6.1); headers that control an engine pass only from trusted clients.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.errors import MalformedRequest

HeaderList = list[tuple[bytes, bytes]]


class Inbound(msgspec.Struct, frozen=True, gc=False):
    """A client's request without its body, as it is forwarded. `target` is the raw path and query."""

    id: str
    method: str
    target: bytes
    headers: HeaderList
    peer: str = ""


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
"""With these a client could send KV to an engine, or make it fetch KV from any address."""

# Recomputed for the upstream request. accept-encoding is dropped because a compressed stream cannot be observed, and a
# compressor delays it.
_REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id", b"x-forwarded-for"})
_NOT_UPSTREAM = HOP_BY_HOP | _REWRITTEN
_NOT_UPSTREAM_UNTRUSTED = _NOT_UPSTREAM | ENGINE_CONTROL
_CORS = frozenset(
    b"access-control-" + name
    for name in (
        b"allow-credentials",
        b"allow-headers",
        b"allow-methods",
        b"allow-origin",
        b"allow-private-network",
        b"expose-headers",
        b"max-age",
    )
)
"""Which web pages may read a response is configured here (`edge.cors_origins`); engines allow all pages by default."""
_NOT_DOWNSTREAM = HOP_BY_HOP | _CORS | {b"date", b"server", b"x-request-id"}


def upstream_headers(headers: HeaderList, *, trusted: bool) -> HeaderList:
    """The client's headers without those that a pod must not receive."""
    dropped = _NOT_UPSTREAM if trusted else _NOT_UPSTREAM_UNTRUSTED
    if b"connection" in dict(headers):
        dropped |= _named_by_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def downstream_headers(headers: HeaderList) -> HeaderList:
    """The pod's headers without those that the client must not receive."""
    dropped = _NOT_DOWNSTREAM
    if b"connection" in dict(headers):
        dropped |= _named_by_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def request_message(method: str, target: bytes, host: bytes, headers: HeaderList, body: bytes) -> bytes:
    """One whole HTTP/1.1 request. Raises `MalformedRequest` where the target or a header contains a line break."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + host, *map(b": ".join, headers)]
    if body or method not in ("GET", "DELETE"):
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join(lines)
    if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
        raise MalformedRequest("The path or a header contains a line break.")
    return head + b"\r\n\r\n" + body


def first_values(headers: HeaderList) -> Mapping[bytes, bytes]:
    return dict(reversed(headers))


def _named_by_connection(headers: HeaderList) -> set[bytes]:
    """Names that the sender declared to be hop-by-hop."""
    tokens = b",".join([value for name, value in headers if name == b"connection"]).split(b",")
    return {token.strip().lower() for token in tokens}
