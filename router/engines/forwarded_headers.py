"""Which headers of a client may not reach a pod?

Connection headers never do (RFC 9110 7.6.1). Credentials and claims of proxies do only if the operator names them
(`edge.forward_headers`). Headers that steer engines are in `steering.py`.
"""

from __future__ import annotations

import re

from router.engines.steering import STEERING_HEADERS

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")

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

CREDENTIALS = frozenset(
    {
        *(b"authorization", b"cookie", b"x-api-key", b"api-key", b"x-goog-api-key", b"x-auth-token"),
        *(b"ocp-apim-subscription-key", b"x-amz-security-token"),
    }
)
"""The client presents these to the router. The router has credentials of its own for pods (`pods[].auth`)."""

PROXY_CLAIMS = frozenset(
    {
        *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip"),
        *(b"cf-connecting-ip", b"fastly-client-ip", b"x-original-forwarded-for", b"x-envoy-external-address"),
        *(b"x-forwarded", b"x-forwarded-by", b"x-forwarded-host", b"x-forwarded-port", b"x-forwarded-prefix"),
        *(b"x-forwarded-proto", b"x-forwarded-scheme", b"x-forwarded-server", b"x-forwarded-ssl"),
        *(b"x-original-url", b"x-original-uri", b"x-rewrite-url", b"x-http-method-override", b"x-method-override"),
    }
)
"""What a proxy says of a request. Any client can say it, and some frameworks act on it."""

# Recomputed for the upstream request. accept-encoding, because a compressed stream cannot be observed, and a compressor
# delays it; content-encoding, because bodies are unpacked.
REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id", b"x-forwarded-for"})
REWRITTEN |= {b"content-encoding"}


def is_header_name(name: str) -> bool:
    """Whether this is the name of a header in lower case (RFC 9110 5.1)."""
    return _NAME.fullmatch(name) is not None


def forwarded_header(name: str) -> str:
    """The name, if the operator can have this header forwarded. Raises `ValueError`."""
    key = name.encode()
    if not is_header_name(name):
        raise ValueError("must be the name of a header in lower case")
    if key in HOP_BY_HOP | REWRITTEN:
        raise ValueError("is set by the router or belongs to one connection")
    if key in STEERING_HEADERS:
        raise ValueError("needs `trust_engine_fields`")
    return name
