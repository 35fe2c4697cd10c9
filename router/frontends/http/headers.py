"""Which headers are sent to the pod, and which to the client?

Hop-by-hop headers never pass (RFC 9110 7.6.1); headers that control an engine pass only from trusted clients;
credentials and claims of proxies pass only if the operator names them (`edge.forward_headers`).
"""

from __future__ import annotations

from collections.abc import Iterable

from router.engines.forwarded_headers import CREDENTIALS, HOP_BY_HOP, PROXY_CLAIMS, REWRITTEN
from router.engines.steering import STEERING_HEADERS
from router.errors import MalformedRequest
from router.request.inbound import HeaderList

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
_NOT_DOWNSTREAM = HOP_BY_HOP | _CORS | {b"server", b"x-request-id"}
_ANSWERS_TO = ((b"authorization", b"www-authenticate"), (b"cookie", b"set-cookie"))
"""A response header reaches the client only if the client's header reaches the pod: a challenge of the pod is for the
router's credentials, and a cookie of one pod would be sent to the next."""


class HeaderRules:
    """Which headers are passed on. `forward`: names that pass although they would be dropped."""

    def __init__(self, *, trust_engine_fields: bool = False, forward: Iterable[str] = ()) -> None:
        self._forward = frozenset(name.encode() for name in forward)
        dropped = CREDENTIALS | PROXY_CLAIMS | (frozenset() if trust_engine_fields else STEERING_HEADERS)
        self._not_upstream = HOP_BY_HOP | REWRITTEN | (dropped - self._forward)
        self._not_downstream = _NOT_DOWNSTREAM | {to for name, to in _ANSWERS_TO if name not in self._forward}

    def upstream(self, headers: HeaderList) -> HeaderList:
        """The client's headers without those that a pod must not receive. Names with `_` are dropped as well: some
        servers read `x_api_key` as `x-api-key`. Where `authorization` is forwarded, so is the key of Anthropic's
        clients, in its place."""
        dropped, forward, named = self._not_upstream, self._forward, dict(headers)
        if b"connection" in named:
            dropped |= _named_by_connection(headers)
        kept = [header for header in headers if header[0] not in dropped]
        if b"x-api-key" in named and b"authorization" in forward and b"authorization" not in named:
            kept.append((b"authorization", b"Bearer " + named[b"x-api-key"]))  # engines read no other header
        if b"_" in b"".join(named):
            return [header for header in kept if b"_" not in header[0] or header[0] in forward]
        return kept

    def downstream(self, headers: HeaderList) -> HeaderList:
        dropped = self._not_downstream
        if b"connection" in dict(headers):
            dropped |= _named_by_connection(headers)
        return [header for header in headers if header[0] not in dropped]


def request_message(method: str, target: bytes, host: bytes, headers: HeaderList, body: bytes) -> bytes:
    """One whole HTTP/1.1 request. Raises what `request_head` raises."""
    return request_head(method, target, host, headers, body) + body


def request_head(method: str, target: bytes, host: bytes, headers: HeaderList, body: bytes) -> bytes:
    """The request in front of its body. Raises `MalformedRequest` where the target or a header contains a line
    break."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + host, *map(b": ".join, headers)]
    if body or method not in ("GET", "DELETE"):
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join(lines)
    if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
        raise MalformedRequest("The path or a header contains a line break.")
    return head + b"\r\n\r\n"


def _named_by_connection(headers: HeaderList) -> set[bytes]:
    tokens = b",".join([value for name, value in headers if name == b"connection"]).split(b",")
    return {token.strip().lower() for token in tokens}
