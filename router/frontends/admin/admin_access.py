"""Decides who may use the admin listener, before a byte of a request's body is read.

A caller that can add a pod can read every prompt. With `admin.bearer_file`, each request needs one of its tokens.
Without it, the listener serves only this machine: no request that came through a proxy, and only under a host name that
no web page can point to the machine (DNS rebinding). A web page of another origin is refused in either case.

Probes need no token: `/livez`, and without a token `/readyz`, answer with the status alone. Nor does the operators'
page, `/ui`: it contains no data, and asks for the token. A link of another page, such as a dashboard, may open it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from starlette.types import ASGIApp

from router.addresses import read_address
from router.admission.tenant import Admitted
from router.config.credentials import BearerFile
from router.config.schema import Limits
from router.errors import AccessDenied, ClientError, NotAuthenticated, RouterError, UnsupportedContentType
from router.frontends.admin.page_snapshot import PAGE_PATH
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.request_head import is_foreign_page
from router.request.inbound import Head

LOCAL_PEERS = frozenset({"127.0.0.1", "::1"})
"""Other addresses of 127.0.0.0/8 are used by proxies: 127.0.0.6 is Istio's, for requests from other machines."""
_BY_PROXY = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
_READS = frozenset({"GET", "HEAD"})

Headers = Mapping[bytes, list[str]]


class AdminEdge(HttpEdge):
    """Refuses requests by their heads, and closes the connection. `host` is the configured one."""

    def __init__(self, limits: Limits, own: ASGIApp, host: str, bearer: BearerFile | None) -> None:
        super().__init__(limits, own)
        self._host = host
        self._bearer = bearer

    def admit(self, head: Head, now_s: float, *, is_next: bool = True) -> tuple[Admitted, RouterError | None]:
        owner, headers = head.network, _by_name(head.headers)
        try:
            if not self._is_probe(head) and self._check_caller(head, headers):
                owner = "operators"  # they share no connections with others of their network
        except ClientError as error:
            return Admitted(owner), error
        return Admitted(owner), self.fault(head)

    def _is_probe(self, head: Head) -> bool:
        """Whether the request needs no token, because it gets the status alone."""
        path, has_token = head.path, b"authorization" in head.named
        is_status = path == "/livez" or (path == "/readyz" and self._bearer is not None and not has_token)
        return is_status and head.method in _READS

    def _check_caller(self, head: Head, headers: Headers) -> bool:
        """Raises `ClientError` for a caller that is not allowed. Returns whether it has sent a token."""
        has_token = False
        if self._bearer is None:
            check_local(headers, head.peer, self._host)
        elif head.path != PAGE_PATH:
            check_token(headers, self._bearer)
            has_token = True
        if is_foreign_page(head.named) and not is_followed_link(head, headers):
            raise AccessDenied("Requests of web pages from another origin are refused.")
        if head.method not in _READS:
            check_content_type(headers)
        return has_token


def check_token(headers: Headers, bearer: BearerFile) -> None:
    """Raises `NotAuthenticated` without an accepted token."""
    scheme, _, token = next(iter(headers.get(b"authorization", [])), "").partition(" ")
    if scheme.lower() != "bearer" or not bearer.accepts(token.strip().encode("latin-1")):
        raise NotAuthenticated("Send `authorization: Bearer TOKEN` with a token of the router's admin.bearer_file.")


def check_local(headers: Headers, peer: str, host: str) -> None:
    """Raises `AccessDenied` unless a process of this machine sent the request. `peer` is empty for a Unix socket,
    `host` the configured host."""
    hint = "To serve others, set admin.bearer_file."
    if peer and peer not in LOCAL_PEERS and peer != host:
        raise AccessDenied(f"Requests from {peer} are refused: only this machine is served. {hint}")
    if through := next((name for name in _BY_PROXY if name in headers), None):
        raise AccessDenied(f"Requests through a proxy (header {through.decode()}) are refused. {hint}")
    names = headers.get(b"host", [])
    if not names or not all(is_own_name(name, host) for name in names):
        raise AccessDenied(f"The Host header must be localhost, an IP address or {host}. {hint}")


def is_own_name(host_header: str, configured: str) -> bool:
    """Whether this host is an IP address, localhost or the configured one: names that no DNS server of an attacker
    resolves."""
    try:
        name, _ = read_address(host_header, 0)
        return name in ("localhost", configured.lower()) or bool(ip_address(name))
    except ValueError:
        return False


def is_followed_link(head: Head, headers: Headers) -> bool:
    """Whether a browser opens the operators' page as a document of its own, from a link. A link sends no Origin; a page
    in a frame has another destination."""
    wanted = {b"sec-fetch-mode": ["navigate"], b"sec-fetch-dest": ["document"]}
    return (
        (head.path, head.method) == (PAGE_PATH, "GET")
        and b"origin" not in headers
        and all(headers.get(name) == value for name, value in wanted.items())
    )


def check_content_type(headers: Headers) -> None:
    """Raises `UnsupportedContentType` unless it is JSON: a web page cannot send that elsewhere without being asked
    first (CORS)."""
    given = headers.get(b"content-type", [])
    if not given or any(value.partition(";")[0].strip().lower() != "application/json" for value in given):
        raise UnsupportedContentType("Send `content-type: application/json` with requests that change something.")


def _by_name(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    found: dict[bytes, list[str]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value.decode("latin-1"))
    return found
