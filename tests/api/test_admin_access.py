"""Who may use the admin listener is decided before a byte of a request's body is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from router.config.bearer_file import BearerFile
from router.frontends.admin.admin_access import MAX_ADMIN_BODY_BYTES, AdminAccess

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
TOKEN = "correct-horse"


class Caller:
    """Sends requests to the middleware, and records what the application behind it gets."""

    def __init__(self, bearer: BearerFile | None = None, host: str = "127.0.0.1") -> None:
        self._app = AdminAccess(
            self._behind, host, bearer, max_preview_bytes=3 * MAX_ADMIN_BODY_BYTES, is_ready=lambda: self.is_ready
        )
        self.is_ready = True
        self.answer: Any = None
        self.bodies: list[bytes] = []
        self.read_bytes = 0
        self.response_headers: dict[bytes, bytes] = {}
        self.error: dict[str, Any] = {}

    async def _behind(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def call(
        self,
        method: str = "GET",
        path: str = "/admin/pods",
        headers: dict[str, str] | None = None,
        *,
        peer: str | None = "127.0.0.1",
        pieces: Iterable[bytes] = (b"",),
    ) -> int:
        """The status of the response."""
        given = {"host": "localhost:9480", **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
            "client": (peer, 1) if peer else None,
        }
        rest = iter(pieces)
        status = 0

        async def receive() -> Message:
            piece = next(rest, None)
            self.read_bytes += len(piece or b"")
            return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, self.response_headers = message["status"], dict(message["headers"])
            elif message["body"]:
                self.answer = msgspec.json.decode(message["body"])
                self.error = self.answer.get("error", {})

        await self._app(scope, receive, send)
        return status


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "token"
    found.write_text(f"{TOKEN}\n")
    return found


def bearer(file: Path) -> BearerFile:
    return BearerFile(str(file), "admin.bearer_file")


def with_token(token: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **headers}


async def test_the_page_itself_needs_no_token_but_its_data_does(file: Path) -> None:
    """A browser cannot send a token when it opens a page; the page contains no data."""
    caller = Caller(bearer(file), "0.0.0.0")
    assert await caller.call(path="/ui", peer="10.0.0.7") == 200
    assert await caller.call(path="/ui/events", peer="10.0.0.7") == 401
    assert await caller.call(path="/ui/events", headers=with_token(TOKEN), peer="10.0.0.7") == 200
    assert await caller.call(path="/ui", headers={"origin": "http://evil.example"}, peer="10.0.0.7") == 403


async def test_without_a_token_the_page_is_for_this_machine_as_everything_else() -> None:
    assert await Caller().call(path="/ui") == 200
    assert await Caller().call(path="/ui", peer="10.0.0.7") == 403
    assert await Caller().call(path="/ui", headers={"host": "evil.example"}) == 403


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", None])
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9480", "127.0.0.1:9480", "[::1]:9480", "10.0.0.7:80"])
async def test_this_machine_is_served_without_a_token(peer: str | None, host: str) -> None:
    """Over IPv4, IPv6 and Unix sockets; a DNS server cannot point an IP address elsewhere."""
    assert await Caller().call(headers={"host": host}, peer=peer) == 200


async def test_the_configured_address_is_served() -> None:
    """Other addresses of 127.0.0.0/8 are only served if they are the listener's."""
    assert await Caller(host="127.0.0.9").call(headers={"host": "127.0.0.9"}, peer="127.0.0.9") == 200


@pytest.mark.parametrize("peer", ["10.0.0.1", "2001:db8::1", "127.0.0.6", "nonsense"])
async def test_other_peers_are_refused_without_a_token(peer: str) -> None:
    """127.0.0.6 is where Istio's sidecar sends requests of other machines from."""
    caller = Caller()
    assert await caller.call("POST", "/admin/pods", JSON, peer=peer) == 403
    assert peer in caller.error["message"] and "admin.bearer_file" in caller.error["message"]
    assert not caller.bodies


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-host"])
async def test_requests_through_a_proxy_are_refused_without_a_token(name: str) -> None:
    """The proxy is local, its client may not be."""
    caller = Caller()
    assert await caller.call(headers={name: "127.0.0.1"}) == 403
    assert name in caller.error["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a@b"])
async def test_a_name_that_a_page_can_point_to_this_machine_is_refused(method: str, host: str) -> None:
    """DNS rebinding: to a browser, the page and the router have the same origin."""
    caller = Caller()
    assert await caller.call(method, headers={"host": host, "origin": f"http://{host}", **JSON}) == 403
    assert not caller.bodies


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
async def test_pages_of_other_origins_are_refused(
    file: Path, secured: bool, method: str, headers: dict[str, str]
) -> None:
    """With and without a token."""
    caller = Caller(bearer(file) if secured else None)
    assert await caller.call(method, "/admin/pods/a/drain", {**with_token(TOKEN), **JSON, **headers}) == 403
    assert not caller.bodies


LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
"""What a browser sends that follows a link of another page, such as a dashboard."""


async def test_a_link_of_another_page_opens_the_operators_page(file: Path) -> None:
    assert await Caller().call(path="/ui", headers=LINK) == 200
    assert await Caller(bearer(file)).call(path="/ui", headers=LINK, peer="10.0.0.7") == 200


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
async def test_a_link_opens_nothing_else(file: Path, method: str, path: str, headers: dict[str, str]) -> None:
    """No data, no change, no frame."""
    for secured in (None, bearer(file)):
        caller = Caller(secured)
        assert await caller.call(method, path, {**with_token(TOKEN), **LINK, **headers}) == 403
        assert not caller.bodies


async def test_a_link_does_not_replace_the_token(file: Path) -> None:
    caller = Caller(bearer(file))
    assert await caller.call(path="/ui/events", headers=LINK, peer="10.0.0.7") == 401


@pytest.mark.parametrize("headers", [{"origin": "http://localhost:9480"}, {"sec-fetch-site": "none"}])
async def test_its_own_pages_are_served(headers: dict[str, str]) -> None:
    assert await Caller().call(headers=headers) == 200


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", None])
@pytest.mark.parametrize("headers", [{}, {"host": "router.example"}, {"x-forwarded-for": "10.0.0.9"}], ids=str)
async def test_a_token_admits_every_peer_under_every_name(
    file: Path, peer: str | None, headers: dict[str, str]
) -> None:
    """A web page that was pointed to this machine has no token."""
    assert await Caller(bearer(file)).call(headers=with_token(TOKEN, **headers), peer=peer) == 200


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", None])
@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN]
)
async def test_a_missing_or_wrong_token_is_refused(file: Path, peer: str | None, authorization: str) -> None:
    """On this machine, too. The answer does not contain it."""
    caller = Caller(bearer(file))
    assert await caller.call("POST", headers={"authorization": authorization, **JSON}, peer=peer) == 401
    assert caller.response_headers[b"www-authenticate"] == b"Bearer"
    assert TOKEN[:-1] not in caller.error["message"] and not caller.bodies


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "given", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/application/json"]
)
async def test_changes_need_a_json_content_type(method: str, given: str) -> None:
    """A page can send the others to any host without asking first."""
    caller = Caller()
    assert await caller.call(method, "/admin/policies/reload", {"content-type": given}) == 415
    assert "application/json" in caller.error["message"] and not caller.bodies
    assert (
        await caller.call(method, "/admin/policies/reload", {"content-type": "application/JSON; charset=utf-8"}) == 200
    )


@pytest.mark.parametrize(
    ("headers", "peer", "status"), [({}, "10.0.0.1", 403), ({"origin": "http://e"}, "127.0.0.1", 403)]
)
async def test_nothing_is_read_from_a_caller_that_may_not(headers: dict[str, str], peer: str, status: int) -> None:
    """And its connection is closed."""
    caller = Caller()
    assert await caller.call("POST", headers={**JSON, **headers}, peer=peer, pieces=[b"x" * 1000]) == status
    assert caller.read_bytes == 0 and caller.response_headers[b"connection"] == b"close"


@pytest.mark.parametrize(("path", "times"), [("/admin/pods", 1), ("/admin/preview", 3)])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_body_is_passed_on_up_to_the_limit(method: str, path: str, times: int) -> None:
    """`/admin/preview` accepts what clients may send."""
    caller, most = Caller(), times * MAX_ADMIN_BODY_BYTES
    assert await caller.call(method, path, JSON, pieces=[b"a" * (most - 1), b"b"]) == 200
    assert caller.bodies == [b"a" * (most - 1) + b"b"]
    assert await caller.call(method, path, JSON, pieces=[b"a" * most, b"b", b"c" * most]) == 413
    assert caller.read_bytes == 2 * most + 1, "stopped at the first byte too many"
    assert caller.response_headers[b"connection"] == b"close"


@pytest.mark.parametrize("declared", [str(MAX_ADMIN_BODY_BYTES + 1), "9" * 30])
async def test_a_body_that_is_declared_too_large_is_not_read(declared: str) -> None:
    caller = Caller()
    assert await caller.call("POST", headers={**JSON, "content-length": declared}, pieces=[b"x"]) == 413
    assert caller.read_bytes == 0


@pytest.mark.parametrize("headers", [{}, {"host": "router.example"}, {"origin": "http://evil.example"}])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_need_no_token(file: Path, method: str, headers: dict[str, str]) -> None:
    """A kubelet has none. It gets the status alone, and no body is read."""
    caller = Caller(bearer=bearer(file))
    assert await caller.call(method, "/livez", headers, peer="10.0.0.9", pieces=[b"x" * 100]) == 200
    assert caller.answer == {"status": "alive"}
    assert await caller.call(method, "/readyz", headers, peer="10.0.0.9", pieces=[b"x" * 100]) == 200
    assert caller.answer == {"status": "ready"}
    caller.is_ready = False
    assert await caller.call(method, "/readyz", headers, peer="10.0.0.9") == 503
    assert caller.answer == {"status": "not ready"}
    assert (caller.read_bytes, caller.bodies) == (0, [])
    assert caller.response_headers[b"connection"] == b"close"


async def test_the_detailed_readiness_needs_the_token(file: Path) -> None:
    caller = Caller(bearer=bearer(file))
    assert await caller.call("GET", "/readyz", with_token(TOKEN)) == 200
    assert caller.bodies == [b""]  # the application behind has answered
    assert await caller.call("GET", "/readyz", with_token("wrong")) == 401


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/livez/", "/livez/../admin/pods", "//livez", "/metrics"])
async def test_only_reads_of_both_paths_are_probes(file: Path, path: str) -> None:
    caller = Caller(bearer=bearer(file))
    assert await caller.call("POST", path, JSON) == 401
    if path not in ("/livez", "/readyz"):
        assert await caller.call("GET", path) == 401


async def test_without_a_bearer_file_the_readiness_stays_local() -> None:
    caller = Caller()
    assert await caller.call("GET", "/livez", peer="10.0.0.9") == 200
    assert await caller.call("GET", "/readyz", peer="10.0.0.9") == 403
