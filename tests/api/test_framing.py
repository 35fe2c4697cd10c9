"""Known request-smuggling vectors, over real sockets: `EdgeProtocol`, the upstream pool, and a pod.

Each vector is either refused, and the connection is closed, or it arrives at the pod as exactly the listed requests.
The vectors are those of the HTTP Garden, of PortSwigger's articles on request smuggling, and of RFC 9112, section 11.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.api.edge_to_pod import AtPod, chain

pytestmark = [pytest.mark.anyio, pytest.mark.net]

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"POST /admin/pods HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}"
NEXT = b"POST /v1/next HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nnext"
AT_NEXT = AtPod(b"next", target=b"/v1/next")
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"


def with_length(headers: bytes = b"", body: bytes = SMUGGLED) -> bytes:
    """A POST with this body and a Content-Length."""
    return HEAD + headers + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes, headers: bytes = b"", trailers: bytes = b"") -> bytes:
    """The same in two chunks."""
    parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part)
    return HEAD + headers + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n" + trailers + b"\r\n"


REFUSED: dict[str, bytes] = {
    "CL.TE": with_length(b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "TE.CL": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n2c\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "TE.TE, another coding last": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n" + SMUGGLED,
    "TE.TE, another coding first": HEAD + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + SMUGGLED,
    "TE identity with a length": with_length(b"Transfer-Encoding: identity\r\n"),
    "TE empty": HEAD + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE with an empty element": HEAD + b"Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE quoted": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n' + SMUGGLED,
    "TE with a parameter": HEAD + b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE after a vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE gzip, chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE chunked, gzip": HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE chunked, chunked": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE in HTTP/1.0": chunked(b"abc").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "CL twice, equal": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "CL twice, different": HEAD + b"Content-Length: 3\r\nContent-Length: 0\r\n\r\nabc",
    "CL as a list": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "CL with a sign": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "CL negative": HEAD + b"Content-Length: -3\r\n\r\nabc",
    "CL with an underscore": HEAD + b"Content-Length: 1_0\r\n\r\n0123456789",
    "CL hexadecimal": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "CL empty": HEAD + b"Content-Length:\r\n\r\nabc",
    "CL above 64 bits": HEAD + b"Content-Length: 18446744073709551619\r\n\r\nabc",
    "header folded": HEAD + b"X-A: a\r\n b\r\n\r\n",
    "TE folded": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "space before the first header": b"POST /v1/x HTTP/1.1\r\n Host: h\r\n\r\n",
    "space before the colon": HEAD + b"Content-Length : 3\r\n\r\nabc",
    "tab before the colon": HEAD + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "header without a colon": HEAD + b"X-A\r\n\r\n",
    "header without a name": HEAD + b": x\r\n\r\n",
    "bare LF after the request line": b"POST /v1/x HTTP/1.1\nHost: h\n\n",
    "bare LF after a header": HEAD + b"X-A: a\nContent-Length: 3\r\n\r\nabc",
    "bare LF ends the head": HEAD + b"X-A: a\r\n\n" + SMUGGLED,
    "bare CR in a header": HEAD + b"X-A: a\rContent-Length: 3\r\n\r\nabc",
    "bare CR ends the head": HEAD + b"X-A: a\r\n\r" + SMUGGLED,
    "NUL in a value": HEAD + b"X-A: a\0b\r\n\r\n",
    "NUL in a name": HEAD + b"X-\0A: a\r\n\r\n",
    "NUL in the path": b"POST /v1/x\0 HTTP/1.1\r\nHost: h\r\n\r\n",
    "tab in the path": b"POST /v1/x\ty HTTP/1.1\r\nHost: h\r\n\r\n",
    "path outside ASCII": b"POST /v1/\xff HTTP/1.1\r\nHost: h\r\n\r\n",
    "control character in a value": HEAD + b"X-A: a\x01b\r\n\r\n",
    "chunk size with a sign": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "chunk size negative": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "chunk size with an underscore": CHUNKED + b"0_3\r\nabc\r\n0\r\n\r\n",
    "chunk size with a prefix": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "chunk size after a space": CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "chunk size before a space": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "chunk size above 64 bits": CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "chunk size empty": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "chunk size before a bare LF": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "chunk data before a bare LF": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "chunk data too long": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "chunk data without a line end": CHUNKED + b"3\r\nabc0\r\n\r\n" + SMUGGLED,
    "chunk extension with a bare LF": CHUNKED + b"3;a\nabc\r\n0\r\n\r\n",
    "chunk extension with a bare CR": CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "chunk extension with a quoted line end": CHUNKED + b'3;a="\r\n"\r\nabc\r\n0\r\n\r\n',
    "chunk extension with NUL": CHUNKED + b"3;a\0\r\nabc\r\n0\r\n\r\n",
    "trailer with a length": chunked(b"abc", trailers=b"Content-Length: 60\r\n") + SMUGGLED,
    "trailer with an encoding": chunked(b"abc", trailers=b"Transfer-Encoding: chunked\r\n") + SMUGGLED,
    "trailer folded": chunked(b"abc", trailers=b"X-A: a\r\n b\r\n"),
    "Host missing": b"POST /v1/x HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "Host missing, to the application": b"GET /livez HTTP/1.1\r\n\r\n",
    "Host twice": HEAD + b"Host: other\r\n\r\n",
    "Host twice, to the application": b"GET /livez HTTP/1.1\r\nhost: h\r\nx-a: a\r\nHOST: h\r\n\r\n",
    "Host missing in a request to upgrade": b"POST /v1/x HTTP/1.1\r\n" + WEBSOCKET + b"Content-Length: 0\r\n\r\n",
    "HTTP/0.9": b"GET /v1/x\r\n\r\n" + SMUGGLED,
    "HTTP/0.9 with headers": b"POST /v1/x HTTP/0.9\r\nHost: h\r\n\r\n",
    "HTTP/1.2": b"POST /v1/x HTTP/1.2\r\nHost: h\r\n\r\n",
    "HTTP/2.0": b"POST /v1/x HTTP/2.0\r\nHost: h\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "authority as target": b"POST h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "lower-case method": b"post /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "space after the version": b"POST /v1/x HTTP/1.1 \r\nHost: h\r\n\r\n",
}


@pytest.mark.parametrize("vector", REFUSED)
async def test_a_request_without_one_meaning_is_refused_with_400_and_the_connection_is_closed(vector: str) -> None:
    """Nothing reaches the pod or the application, also not what follows the request."""
    async with chain() as client:
        client.writer.write(REFUSED[vector] + NEXT)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close\r\n" in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
        assert not client.pod.requests and not client.own


TRAILERS = b"Authorization: Bearer stolen\r\nContent-Encoding: gzip\r\nX-Session-Id: s\r\nHost: other\r\n"
SERVED: dict[str, tuple[bytes, list[AtPod]]] = {
    "by length": (with_length(), [AtPod(SMUGGLED)]),
    "chunked": (chunked(SMUGGLED), [AtPod(SMUGGLED)]),
    "length with spaces": (HEAD + b"Content-Length:  3 \r\n\r\nabc", [AtPod(b"abc")]),
    "TE in capitals, after a tab": (HEAD + b"Transfer-Encoding:\tCHUNKED\r\n\r\n1\r\na\r\n0\r\n\r\n", [AtPod(b"a")]),
    "upgrade with a length": (with_length(WEBSOCKET), [AtPod(SMUGGLED, [(b"sec-websocket-key", b"x")])]),
    "upgrade, chunked": (chunked(SMUGGLED, WEBSOCKET), [AtPod(SMUGGLED, [(b"sec-websocket-key", b"x")])]),
    "upgrade without a body": (HEAD + WEBSOCKET + b"\r\n", [AtPod(b"", [(b"sec-websocket-key", b"x")])]),
    "upgrade twice": (with_length(WEBSOCKET + b"Upgrade: h2c\r\n"), [AtPod(SMUGGLED, [(b"sec-websocket-key", b"x")])]),
    "upgrade in Proxy-Connection": (with_length(b"Proxy-Connection: upgrade\r\nUpgrade: x\r\n"), [AtPod(SMUGGLED)]),
    "upgrade without Connection": (with_length(b"Upgrade: h2c\r\n"), [AtPod(SMUGGLED)]),
    "Connection without upgrade": (with_length(b"Connection: upgrade\r\n"), [AtPod(SMUGGLED)]),
    "h2c as Java sends it": (with_length(H2C), [AtPod(SMUGGLED)]),
    "h2c twice": (with_length(H2C) + with_length(H2C, b"b"), [AtPod(SMUGGLED), AtPod(b"b")]),
    "trailers": (chunked(SMUGGLED, trailers=TRAILERS), [AtPod(SMUGGLED)]),
    "trailers of a request to upgrade": (chunked(SMUGGLED, H2C, TRAILERS), [AtPod(SMUGGLED)]),
    "upgrade in trailers": (chunked(SMUGGLED, trailers=H2C) + with_length(), [AtPod(SMUGGLED), AtPod(SMUGGLED)]),
    "chunk extensions": (CHUNKED + b'3;a=b;c="d;e"\r\nabc\r\n0;x\r\n\r\n', [AtPod(b"abc")]),
    "chunk sizes with zeros": (CHUNKED + b"0" * 60 + b"3\r\nabc\r\n000\r\n\r\n", [AtPod(b"abc")]),
    "absolute form, another authority": (
        HEAD.replace(b"/v1/x", b"http://admin:9480/v1/x?a=b") + b"Content-Length: 1\r\n\r\na",
        [AtPod(b"a", target=b"/v1/x?a=b")],
    ),
    "headers named by Connection": (
        with_length(b"Connection: x-a, content-length\r\nX-A: a\r\nX-B: b\r\n"),
        [AtPod(SMUGGLED, [(b"x-b", b"b")])],
    ),
    "Host empty": (b"POST /v1/x HTTP/1.1\r\nHost:\r\nContent-Length: 1\r\n\r\na", [AtPod(b"a")]),
    "an expectation that is unknown": (with_length(b"Expect: 200-ok\r\n"), [AtPod(SMUGGLED)]),
    "GET with a body": (
        with_length().replace(b"POST /v1/x", b"GET /v1/x", 1),
        [AtPod(SMUGGLED, method=b"GET")],
    ),
    "blank lines before": (b"\r\n\r\n" + with_length(), [AtPod(SMUGGLED)]),
}


@pytest.mark.parametrize("pieces", ["whole", "single bytes"])
@pytest.mark.parametrize("vector", SERVED)
async def test_a_request_with_one_meaning_is_served_with_exactly_its_headers_and_body(vector: str, pieces: str) -> None:
    """The connection then serves the next request."""
    sent, expected = SERVED[vector]
    sent += NEXT
    step = len(sent) if pieces == "whole" else 1
    async with chain() as client:
        for at in range(0, len(sent), step):
            client.writer.write(sent[at : at + step])
            await asyncio.sleep(0)
        for _ in (*expected, AT_NEXT):
            assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert client.pod.requests == [*expected, AT_NEXT]
        assert not client.own


@pytest.mark.parametrize("framing", [with_length, chunked])
async def test_the_body_of_a_request_to_upgrade_is_no_request(framing: Any) -> None:
    """For the application, in the same piece and in another."""
    sent = b"GET /livez HTTP/1.1\r\nHost: h\r\n" + WEBSOCKET + framing(body=SMUGGLED).partition(HEAD)[2]
    for cut in (len(sent), len(sent) - len(SMUGGLED), sent.index(b"\r\n\r\n") + 4):
        async with chain() as client:
            for piece in (sent[:cut], sent[cut:] + NEXT):
                client.writer.write(piece)
                await asyncio.sleep(0)
            assert (await client.answer())[1] == b'"own"'
            assert (await client.answer())[1] == b"ok"
            ((seen),) = client.own
            assert (seen.body, seen.target, dict(seen.headers).get(b"upgrade")) == (SMUGGLED, b"/livez", None)
            assert client.pod.requests == [AT_NEXT]


async def test_trailers_do_not_reach_the_application() -> None:
    sent = chunked(b"abc", b"X-A: a\r\n", TRAILERS).replace(b"/v1/x", b"/own")
    async with chain() as client:
        client.writer.write(sent)
        await client.answer()
        assert client.own == [AtPod(b"abc", [(b"x-a", b"a"), (b"transfer-encoding", b"chunked")], b"/own")]


async def test_trailers_of_a_pod_are_not_headers_of_the_response() -> None:
    async with chain() as client:
        client.pod.answer = (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-a: a\r\n\r\n2\r\nok\r\n0\r\nx-b: b\r\n\r\n"
        )
        for _ in range(2):
            client.writer.write(with_length(body=b"a"))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"x-a: a\r\n" in head and b"x-b" not in head
            assert await client.reader.readexactly(12) == b"2\r\nok\r\n0\r\n\r\n"


@pytest.mark.parametrize("target", [b"h:443", b"/v1/x"])
async def test_connect_is_refused_and_the_connection_is_closed(target: bytes) -> None:
    """The router is not a forward proxy: what follows is not parsed."""
    async with chain() as client:
        sent = b"CONNECT %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (target, len(SMUGGLED))
        client.writer.write(sent + SMUGGLED + NEXT)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 405 ") and b"CONNECT is not supported" in body
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
        assert not client.pod.requests and not client.own


@pytest.mark.parametrize(
    "ended",
    [with_length(b"Connection: close\r\n"), with_length().replace(b"HTTP/1.1", b"HTTP/1.0", 1), with_length() + b"\0"],
    ids=["Connection: close", "HTTP/1.0", "an error"],
)
async def test_nothing_is_parsed_after_the_last_request_of_a_connection(ended: bytes) -> None:
    """The requests before are answered."""
    async with chain() as client:
        client.writer.write(ended + NEXT)
        assert (await client.answer())[1] == b"ok"
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
        assert client.pod.requests == [AtPod(SMUGGLED)]


async def test_an_oversized_chunk_extension_is_refused() -> None:
    """It counts as a header, also when it does not end."""
    async with chain() as client:
        client.writer.write(HEAD + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        # In one piece: bytes that the router has not read reset the connection, which may lose the answer.
        client.writer.write(b"3;" + b"a" * 5000)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 431 ")
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
        assert not client.pod.requests


async def test_a_client_of_http_1_0_gets_no_interim_response() -> None:
    """RFC 9110 10.1.1: its `Expect` is ignored."""
    async with chain() as client:
        client.writer.write(with_length(b"Expect: 100-continue\r\n", b"a").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await client.answer())[1] == b"ok"
        assert client.pod.requests == [AtPod(b"a")]


async def test_what_is_wrong_is_named() -> None:
    """Also in a request to upgrade, whose head is parsed twice."""
    for vector, words in (("Host missing in a request to upgrade", b"Host"), ("CL twice, equal", b"Content-Length")):
        async with chain() as client:
            client.writer.write(REFUSED[vector])
            assert words in (await client.answer())[1]


@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
async def test_the_body_of_a_request_that_was_refused_is_dropped(expects: bytes) -> None:
    """Its bytes would count against `limits.max_held_bytes` for as long as the router runs."""
    async with chain() as client:
        for _ in range(3):
            client.writer.write(b"POST /v1/%%2e HTTP/1.1\r\nhost: h\r\n%bcontent-length: 20000\r\n\r\n" % expects)
            assert (await client.answer())[0].startswith(b"HTTP/1.1 400")
            client.writer.write(b"x" * 20_000)
        client.writer.write(b"GET /v1/files HTTP/1.1\r\nhost: h\r\n\r\n")
        await client.answer()
        assert client.edge.body_memory.bytes == 0
