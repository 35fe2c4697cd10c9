"""Does the head of a request have one meaning, and who sent it?

Pure checks that `httptools` leaves to its user. A head that another proxy could read differently is an error, because
that proxy would find other requests in the same bytes (request smuggling), or another path (RFC 3986 6.2, 7.3): a path
is never decoded here. This module reads no body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import Any, NamedTuple, cast

import httptools
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from router.endpoints import CONVENTIONS
from router.engines.forwarded_paths import meant_hint
from router.errors import AccessDenied, MalformedRequest, RouterError
from router.frontends.http.exchange import Exchange
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


# --- who sent it: clients without a key are named by their address ---

IPV4_IN_IPV6 = "::ffff:"
MAX_ADDRESS = 45
"""Characters of an address that are compared: all of an IPv6 address."""


def host_in(address: object) -> str:
    """The host in a socket's address of a client; empty for a Unix socket. An IPv4 client of a listener for IPv6 and
    IPv4 has the address ::ffff:a.b.c.d there."""
    return str(address[0]).removeprefix(IPV4_IN_IPV6) if isinstance(address, tuple) else ""


@cache
def trusted_proxies(allowed: str) -> ProxyHeadersMiddleware:
    """uvicorn's check of `forwarded_allow_ips`. The middleware itself is never called."""
    return ProxyHeadersMiddleware(cast(Any, None), allowed)


def client_network(address: str, proxies: ProxyHeadersMiddleware) -> str:
    """The network of a client; "" for a proxy or no address."""
    return network_of(address) if address and address not in proxies.trusted_hosts else ""


def network_of(address: str) -> str:
    """The address of a client, or its network of IPv6, in which it may choose any."""
    return _network_of(address[:MAX_ADDRESS]) if ":" in address else address[:MAX_ADDRESS]


@lru_cache(4096)
def _network_of(address: str) -> str:
    try:
        return str(IPv6Network((int(IPv6Address(address)) >> 64 << 64, 64)))
    except ValueError:
        return address


def forwarded_for(host: str, headers: HeaderList, proxies: ProxyHeadersMiddleware) -> str:
    """The client's address: from x-forwarded-for if `host`, which connected, is a trusted proxy."""
    trusted = proxies.trusted_hosts
    if host not in trusted:
        return host
    forwarded = [value for name, value in headers if name == b"x-forwarded-for"]
    chain = b", ".join(forwarded).decode("latin-1")
    return trusted.get_trusted_client_address(chain)[0] or host


# --- web pages (CORS) ---

# `edge.cors_origins` names the origins whose pages may read the router's responses. The router answers preflights
# itself and adds its own headers to responses. CORS headers of pods never pass (`headers.py`). "Credentials" of CORS
# are cookies, which the router does not use; API keys are plain headers.

_EXPOSED = b", ".join(
    (
        *(b"x-request-id", b"retry-after", b"x-warmroute-pod", b"x-warmroute-prefill-pod", b"x-warmroute-policy"),
        *(b"x-warmroute-cached-tokens", b"x-warmroute-match", b"x-warmroute-continuable", b"retry-after-ms"),
        *(b"x-warmroute-model", b"x-warmroute-fallback"),
        *(name for one in CONVENTIONS for of in one.limits for name in one.limit_headers(of)),
    )
)
_PREFLIGHT: HeaderList = [
    (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
    (b"access-control-allow-headers", b"authorization, *"),  # the wildcard does not include authorization
    (b"access-control-max-age", b"7200"),
]

_WITHOUT_PREFLIGHT = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")


class CorsPolicy:
    def __init__(self, origins: Iterable[str]) -> None:
        shared = (b"access-control-expose-headers", _EXPOSED), (b"vary", b"origin")
        self._headers: Mapping[bytes, HeaderList] = {
            origin: [(b"access-control-allow-origin", origin), *shared] for origin in map(str.encode, origins)
        }
        self._other = self._headers.get(b"*", [])

    def headers_for(self, origin: bytes | None) -> HeaderList:
        """Empty if the origin is not allowed, or if the request has none."""
        return [] if origin is None else self._headers.get(origin, self._other)


def is_foreign_page(named: Mapping[bytes, bytes], cors: CorsPolicy | None = None) -> bool:
    """Whether a web page of another origin sends a request, and is not allowed to. Older browsers do not say whose page
    it is."""
    origin, site = named.get(b"origin"), named.get(b"sec-fetch-site")
    if cors is not None and cors.headers_for(origin):
        return False
    if site is not None:
        return site not in (b"same-origin", b"none")
    host = named.get(b"host", b"").lower()
    return origin is not None and origin.lower() not in (b"http://" + host, b"https://" + host)


def page_refusal(method: str, named: Mapping[bytes, bytes], cors: CorsPolicy | None) -> RouterError | None:
    """Why a request of a page is refused that browsers send without a preflight; None if it is not."""
    content_type = named.get(b"content-type", b"text/plain").strip().lower()
    if method != "POST" or not content_type.startswith(_WITHOUT_PREFLIGHT) or not is_foreign_page(named, cors):
        return None
    return AccessDenied("Requests of web pages from another origin are refused (edge.cors_origins).")


def is_preflight(method: str, named: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks if it may send a request."""
    return method == "OPTIONS" and b"access-control-request-method" in named


async def answer_preflight(client: Exchange) -> None:
    """Allow every method and header; the request itself is checked when it arrives."""
    client.start(204, _PREFLIGHT)
    client.finish()
