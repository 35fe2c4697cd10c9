"""Which web pages may use the router from a browser."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from router.config.schema import Edge, Limits
from router.errors import AccessDenied
from router.frontends.http.http_edge import HttpEdge
from router.request import tracker
from router.request.inbound import Head
from tests.api.edge_to_pod import Chain, chain

pytestmark = [pytest.mark.anyio, pytest.mark.net]
PAGE = b"https://chat.example.com"
ALLOWED = Edge(cors_origins=(PAGE.decode(), "http://localhost:3000"))
Headers = Mapping[bytes, list[bytes]]
EXPOSED = {"x-request-id", *re.findall('b"(x-warmroute-.*?)"', inspect.getsource(tracker))}
PREFLIGHT = b"access-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type\r\n"


async def call(client: Chain, method: bytes, path: bytes, origin: bytes, headers: bytes = b"") -> Headers:
    """The headers of the response, with all values of each; `status` is the status."""
    client.writer.write(b"%b %b HTTP/1.1\r\nhost: h\r\norigin: %b\r\n%b\r\n" % (method, path, origin, headers))
    head = await client.reader.readuntil(b"\r\n\r\n")
    status, *lines = head.rstrip().split(b"\r\n")
    found: dict[bytes, list[bytes]] = {b"status": [status.split()[1]]}
    for line in lines:
        name, _, value = line.partition(b": ")
        found.setdefault(name, []).append(value)
    length = int(found.get(b"content-length", [b"0"])[0])
    await client.reader.readexactly(0 if method == b"HEAD" else length)
    return found


def cors_of(headers: Headers) -> dict[bytes, list[bytes]]:
    return {name: values for name, values in headers.items() if name.startswith(b"access-control-")}


@pytest.mark.parametrize("path", [b"/v1/x", b"/v1/models", b"/livez"])
async def test_a_preflight_of_an_allowed_origin_is_answered_by_the_router(path: bytes) -> None:
    """For every method and header, without asking a pod. `*` alone would not include authorization."""
    async with chain(ALLOWED) as client:
        for _ in range(2):
            answer = await call(client, b"OPTIONS", path, PAGE, PREFLIGHT)
            assert (answer[b"status"], answer[b"vary"]) == ([b"204"], [b"origin"])
            assert answer[b"access-control-allow-origin"] == [PAGE]
            assert b"POST" in answer[b"access-control-allow-methods"][0].split(b", ")
            assert answer[b"access-control-allow-headers"] == [b"authorization, *"]
        assert not client.pod.requests and not client.own


@pytest.mark.parametrize(("method", "path"), [(b"POST", b"/v1/x"), (b"GET", b"/livez"), (b"PATCH", b"/livez")])
async def test_responses_to_an_allowed_origin_have_its_headers_once(method: bytes, path: bytes) -> None:
    """Pods allow all origins by default; the router's own responses include errors."""
    async with chain(ALLOWED) as client:
        cors = b"\r\naccess-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\n"
        client.pod.answer = client.pod.answer.replace(b"\r\n", cors, 1)
        answer = await call(client, method, path, PAGE)
        assert answer[b"access-control-allow-origin"] == [PAGE]
        assert b"access-control-allow-credentials" not in answer
        assert {*answer[b"access-control-expose-headers"][0].decode().split(", ")} >= EXPOSED
        assert answer[b"vary"] == [b"origin"]


async def test_errors_of_the_edge_to_an_allowed_origin_have_its_headers() -> None:
    """Also those that follow from the headers alone: the page shows the message."""
    async with chain(ALLOWED) as client:
        answer = await call(client, b"POST", b"/v1/x", PAGE, b"content-length: 99999999999\r\n")
        assert (answer[b"status"], answer[b"access-control-allow-origin"]) == ([b"413"], [PAGE])


async def test_streams_to_an_allowed_origin_have_its_headers() -> None:
    async with chain(ALLOWED) as client:
        client.pod.answer = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        answer = await call(client, b"POST", b"/v1/x", PAGE)
        assert (answer[b"transfer-encoding"], answer[b"access-control-allow-origin"]) == ([b"chunked"], [PAGE])


@pytest.mark.parametrize("edge", [ALLOWED, Edge()], ids=["other origins", "no origins"])
@pytest.mark.parametrize("origin", [b"https://evil.example.com", PAGE + b".evil.com", b"null", b"*", b""])
async def test_other_origins_get_no_cors_headers(edge: Edge, origin: bytes) -> None:
    """Neither the router's nor the pod's, so that the browser keeps the response from the page."""
    async with chain(edge) as client:
        client.pod.answer = client.pod.answer.replace(b"\r\n", b"\r\naccess-control-allow-origin: *\r\n", 1)
        for method, path in ((b"POST", b"/v1/x"), (b"GET", b"/livez"), (b"OPTIONS", b"/v1/x")):
            answer = await call(client, method, path, origin, PREFLIGHT)
            assert not cors_of(answer) and b"vary" not in answer
        assert answer[b"status"] == [b"405"]


async def posted(client: Chain, *headers: bytes) -> bytes:
    """The status of a POST to a pod, with these headers."""
    lines = b"".join(b"%b\r\n" % header for header in headers)
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n%b\r\n{}" % lines)
    return (await client.answer())[0].split()[1]


FOREIGN = b"origin: https://evil.example.com"
TEXT = b"content-type: text/plain;charset=UTF-8"


@pytest.mark.parametrize(
    "headers",
    [
        (FOREIGN, TEXT),
        (FOREIGN, b"content-type: Application/x-www-form-urlencoded"),
        (FOREIGN, b"content-type: multipart/form-data; boundary=x"),
        (FOREIGN,),
        (b"origin: null", TEXT),
        (b"origin: http://h", b"sec-fetch-site: same-site", TEXT),
    ],
)
async def test_a_page_of_another_origin_cannot_post_what_browsers_send_without_asking(headers: tuple[bytes]) -> None:
    """It cannot read the answer, but the request would be computed; without keys, anybody's browser could be used."""
    async with chain(ALLOWED) as client:
        assert await posted(client, *headers) == b"403"
        assert not client.pod.requests


@pytest.mark.parametrize(
    "headers",
    [
        (TEXT,),
        (),
        (FOREIGN, b"content-type: application/json"),  # a browser has asked first, and was not allowed
        (b"origin: " + PAGE, TEXT),
        (b"origin: http://H", TEXT),
        (b"origin: https://behind.a.proxy", b"sec-fetch-site: same-origin", TEXT),
    ],
)
async def test_other_posts_are_served_whatever_their_content_type(headers: tuple[bytes]) -> None:
    """Programs, pages that are allowed, and the router's own origin."""
    async with chain(ALLOWED) as client:
        assert await posted(client, *headers) == b"200"


def test_every_listener_refuses_what_a_page_of_another_origin_posts() -> None:
    """Also that of `warmroute publish`, which has no keys. Forms of programs pass, which send no origin."""
    form = {b"content-type": b"application/x-www-form-urlencoded"}
    for sent, refused in (({b"origin": b"https://evil.example.com"}, AccessDenied), ({}, type(None))):
        head = Head("", "POST", b"/revision", [], "/revision", form | sent)
        assert type(HttpEdge(Limits(), FastAPI()).admit(head, 0.0)[1]) is refused


async def test_a_star_allows_all_origins() -> None:
    async with chain(Edge(cors_origins=("*",))) as client:
        for origin in (PAGE, b"null"):
            answer = await call(client, b"POST", b"/v1/x", origin)
            assert (answer[b"status"], answer[b"access-control-allow-origin"]) == ([b"200"], [b"*"])
        assert (await call(client, b"OPTIONS", b"/v1/x", PAGE, PREFLIGHT))[b"status"] == [b"204"]


@pytest.mark.parametrize("origin", ["a.com", "https://a.com/", "https://A.com", "https://a, https://b", "null", ""])
def test_an_origin_that_no_browser_sends_is_a_configuration_error(origin: str) -> None:
    with pytest.raises(ValidationError, match="scheme://host"):
        Edge(cors_origins=(origin,))
