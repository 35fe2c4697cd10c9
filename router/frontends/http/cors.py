"""Which web pages may read the router's responses (CORS)?

`edge.cors_origins` names their origins. The router answers preflights itself and adds its own headers to responses.
CORS headers of pods never pass (`headers.py`). "Credentials" of CORS are cookies, which the router does not use; API
keys are plain headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.endpoints import CONVENTIONS
from router.errors import AccessDenied, RouterError
from router.frontends.http.exchange import Exchange
from router.request.inbound import HeaderList

_EXPOSED = b", ".join(
    (
        *(b"x-request-id", b"retry-after", b"x-warmroute-pod", b"x-warmroute-prefill-pod", b"x-warmroute-policy"),
        *(b"x-warmroute-cached-tokens", b"x-warmroute-match", b"retry-after-ms"),
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
