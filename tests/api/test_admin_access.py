"""Who may use the admin listener is decided before a byte of a request's body is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI

from router.config.credentials import BearerFile
from router.config.schema import Limits
from router.errors import RouterError, status_of
from router.frontends.admin.admin_access import AdminEdge
from router.request.error_responses import error_headers
from router.request.inbound import Head, first_values

LIMITS = Limits()
JSON = {"content-type": "application/json"}
TOKEN = "correct-horse"


class Caller:
    """Sends heads of requests to the edge."""

    def __init__(self, bearer: BearerFile | None = None, host: str = "127.0.0.1") -> None:
        self._edge = AdminEdge(LIMITS, FastAPI(), host, bearer)
        self.refused: RouterError | None = None

    def call(
        self,
        method: str = "GET",
        path: str = "/admin/pods",
        headers: dict[str, str] | None = None,
        *,
        peer: str | None = "127.0.0.1",
    ) -> int:
        """The status of the response; 200 if the application answers."""
        given = {"host": "localhost:9480", **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in given.items() if value]
        head = Head("", method, path.encode(), raw, path, first_values(raw), peer=peer or "")
        self.refused = self._edge.admit(head, 0.0)[1]
        return status_of(self.refused) if self.refused else 200


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "token"
    found.write_text(f"{TOKEN}\n")
    return found


def bearer(file: Path) -> BearerFile:
    return BearerFile(str(file), "admin.bearer_file")


def with_token(token: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **headers}


def test_the_page_itself_needs_no_token_but_its_data_does(file: Path) -> None:
    """A browser cannot send a token when it opens a page; the page contains no data."""
    caller = Caller(bearer(file), "0.0.0.0")
    assert caller.call(path="/ui", peer="10.0.0.7") == 200
    assert caller.call(path="/ui/events", peer="10.0.0.7") == 401
    assert caller.call(path="/ui/events", headers=with_token(TOKEN), peer="10.0.0.7") == 200
    assert caller.call(path="/ui", headers={"origin": "http://evil.example"}, peer="10.0.0.7") == 403


def test_without_a_token_the_page_is_for_this_machine_as_everything_else() -> None:
    assert Caller().call(path="/ui") == 200
    assert Caller().call(path="/ui", peer="10.0.0.7") == 403
    assert Caller().call(path="/ui", headers={"host": "evil.example"}) == 403


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", None])
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9480", "127.0.0.1:9480", "[::1]:9480", "10.0.0.7:80"])
def test_this_machine_is_served_without_a_token(peer: str | None, host: str) -> None:
    """Over IPv4, IPv6 and Unix sockets; a DNS server cannot point an IP address elsewhere."""
    assert Caller().call(headers={"host": host}, peer=peer) == 200


def test_the_configured_address_is_served() -> None:
    """Other addresses of 127.0.0.0/8 are only served if they are the listener's."""
    assert Caller(host="127.0.0.9").call(headers={"host": "127.0.0.9"}, peer="127.0.0.9") == 200


@pytest.mark.parametrize("peer", ["10.0.0.1", "2001:db8::1", "127.0.0.6", "nonsense"])
def test_other_peers_are_refused_without_a_token(peer: str) -> None:
    """127.0.0.6 is where Istio's sidecar sends requests of other machines from."""
    caller = Caller()
    assert caller.call("POST", "/admin/pods", JSON, peer=peer) == 403
    assert peer in str(caller.refused) and "admin.bearer_file" in str(caller.refused)


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-host"])
def test_requests_through_a_proxy_are_refused_without_a_token(name: str) -> None:
    """The proxy is local, its client may not be."""
    caller = Caller()
    assert caller.call(headers={name: "127.0.0.1"}) == 403
    assert name in str(caller.refused)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a@b"])
def test_a_name_that_a_page_can_point_to_this_machine_is_refused(method: str, host: str) -> None:
    """DNS rebinding: to a browser, the page and the router have the same origin."""
    caller = Caller()
    assert caller.call(method, headers={"host": host, "origin": f"http://{host}", **JSON}) == 403


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "chrome-extension://localhost:9480"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_pages_of_other_origins_are_refused(file: Path, secured: bool, method: str, headers: dict[str, str]) -> None:
    """With and without a token."""
    caller = Caller(bearer(file) if secured else None)
    assert caller.call(method, "/admin/pods/a/drain", {**with_token(TOKEN), **JSON, **headers}) == 403


LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
"""What a browser sends that follows a link of another page, such as a dashboard."""


def test_a_link_of_another_page_opens_the_operators_page(file: Path) -> None:
    assert Caller().call(path="/ui", headers=LINK) == 200
    assert Caller(bearer(file)).call(path="/ui", headers=LINK, peer="10.0.0.7") == 200


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/ui/events", {}),
        ("GET", "/admin/pods", {}),
        ("POST", "/ui", JSON),
        ("GET", "/ui", {"sec-fetch-dest": "iframe"}),
        ("GET", "/ui", {"sec-fetch-mode": "no-cors"}),
        ("GET", "/ui", {"origin": "http://evil.example"}),
    ],
    ids=str,
)
def test_a_link_opens_nothing_else(file: Path, method: str, path: str, headers: dict[str, str]) -> None:
    """No data, no change, no frame."""
    for secured in (None, bearer(file)):
        caller = Caller(secured)
        assert caller.call(method, path, {**with_token(TOKEN), **LINK, **headers}) == 403


def test_a_link_does_not_replace_the_token(file: Path) -> None:
    caller = Caller(bearer(file))
    assert caller.call(path="/ui/events", headers=LINK, peer="10.0.0.7") == 401


@pytest.mark.parametrize("headers", [{"origin": "http://localhost:9480"}, {"sec-fetch-site": "none"}])
def test_its_own_pages_are_served(headers: dict[str, str]) -> None:
    assert Caller().call(headers=headers) == 200


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", None])
@pytest.mark.parametrize("headers", [{}, {"host": "router.example"}, {"x-forwarded-for": "10.0.0.9"}], ids=str)
def test_a_token_admits_every_peer_under_every_name(file: Path, peer: str | None, headers: dict[str, str]) -> None:
    """A web page that was pointed to this machine has no token."""
    assert Caller(bearer(file)).call(headers=with_token(TOKEN, **headers), peer=peer) == 200


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", None])
@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN]
)
def test_a_missing_or_wrong_token_is_refused(file: Path, peer: str | None, authorization: str) -> None:
    """On this machine, too. The answer does not contain it."""
    caller = Caller(bearer(file))
    assert caller.call("POST", headers={"authorization": authorization, **JSON}, peer=peer) == 401
    assert caller.refused
    assert (b"www-authenticate", b"Bearer") in error_headers(caller.refused, b"")
    assert TOKEN[:-1] not in str(caller.refused)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "given", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/application/json"]
)
def test_changes_need_a_json_content_type(method: str, given: str) -> None:
    """A page can send the others to any host without asking first."""
    caller = Caller()
    assert caller.call(method, "/admin/policies/reload", {"content-type": given}) == 415
    assert "application/json" in str(caller.refused)
    assert caller.call(method, "/admin/policies/reload", {"content-type": "application/JSON; charset=utf-8"}) == 200


@pytest.mark.parametrize("declared", [str(LIMITS.max_body_bytes + 1), "9" * 30])
def test_a_body_that_is_declared_too_large_is_refused(declared: str) -> None:
    assert Caller().call("POST", headers={**JSON, "content-length": declared}) == 413
    assert Caller().call("POST", headers={**JSON, "content-length": str(LIMITS.max_body_bytes)}) == 200


@pytest.mark.parametrize("headers", [{}, {"host": "router.example"}, {"origin": "http://evil.example"}])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_need_no_token(file: Path, method: str, headers: dict[str, str]) -> None:
    """A kubelet has none."""
    caller = Caller(bearer=bearer(file))
    assert caller.call(method, "/livez", headers, peer="10.0.0.9") == 200
    assert caller.call(method, "/readyz", headers, peer="10.0.0.9") == 200


def test_the_detailed_readiness_needs_the_token(file: Path) -> None:
    caller = Caller(bearer=bearer(file))
    assert caller.call("GET", "/readyz", with_token(TOKEN)) == 200
    assert caller.call("GET", "/readyz", with_token("wrong")) == 401


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/livez/", "/livez/../admin/pods", "//livez", "/metrics"])
def test_only_reads_of_both_paths_are_probes(file: Path, path: str) -> None:
    caller = Caller(bearer=bearer(file))
    assert caller.call("POST", path, JSON) == 401
    if path not in ("/livez", "/readyz"):
        assert caller.call("GET", path) == 401


def test_without_a_bearer_file_the_readiness_stays_local() -> None:
    caller = Caller()
    assert caller.call("GET", "/livez", peer="10.0.0.9") == 200
    assert caller.call("GET", "/readyz", peer="10.0.0.9") == 403
