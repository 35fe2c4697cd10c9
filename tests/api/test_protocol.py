"""`EdgeProtocol` on real connections, with a fake edge."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Any, cast

import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from router.admission.fair_bound import body_memory
from router.admission.gate import AdmissionGate
from router.admission.tenant import OPEN_TENANT, Admitted
from router.config.schema import Limits
from router.errors import BodyTooLarge, HeadersTooLarge, MalformedRequest, RequestTimeout, RouterError, Saturated
from router.frontends.http.exchange import PROGRESS_BYTES, Exchange
from router.frontends.http.http_edge import AnyExchange, HttpEdge
from router.frontends.http.protocol import MAX_AHEAD, EdgeProtocol
from router.request.inbound import Head, HeaderList
from tests.kit.deadlines import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.net]
MAX_BYTES = 1000
LIMITS = Limits(max_body_bytes=MAX_BYTES, max_header_bytes=1024)
SOON_S = 0.05
"""A timeout for tests that wait until it expires."""
Answer = Callable[[Exchange], Awaitable[None]]


class Edge(HttpEdge):
    """Takes requests under /v1, records them, and answers with `answer`. Knows the tenants of its `gate`."""

    own_bodies = False

    def __init__(
        self,
        answer: Answer,
        limits: Limits = LIMITS,
        memory_bytes: int = 2 * MAX_BYTES,
        gate: AdmissionGate | None = None,
    ) -> None:
        own = FastAPI(openapi_url=None)
        own.add_api_route("/own", own_answer, methods=["POST"])
        own.add_api_route("/v1/models", own_answer)
        super().__init__(limits, own, body_memory(memory_bytes))
        self.methods = forwarded
        self.answer = answer
        self.gate = gate or AdmissionGate()
        self.abandoned_paths: list[str] = []
        self.seen: list[Exchange] = []
        self.gone, self.began = asyncio.Event(), asyncio.Event()
        self.connections: set[Any] = set()
        self.heads = 0
        """Heads of requests that it has looked at."""

    def admit(self, head: Head, now_s: float, *, is_next: bool = True) -> tuple[Admitted, RouterError | None]:
        self.heads += 1
        admitted, refusal = super().admit(head, now_s)
        if refusal is None and head.needs_key:
            found = self.gate.admit(head.path, head.named, now_s)
            if isinstance(found, RouterError):
                return admitted, found
            admitted = Admitted(head.network if found is OPEN_TENANT else found.name, found)
        return admitted, refusal

    async def make_plain(self, client: AnyExchange) -> None:
        pass

    def abandoned(self, client: AnyExchange) -> None:
        self.abandoned_paths.append(client.head.path)

    def standalone_error(self, error: RouterError) -> bytes:
        return b"HTTP/1.1 999 %b\r\n\r\n" % type(error).__name__.encode()

    async def serve(self, client: AnyExchange) -> None:
        assert isinstance(client, Exchange)
        self.seen.append(client)
        self.began.set()
        try:
            if client.refusal:
                await whole(b"refused", 413)(client)
            else:
                await self.answer(client)
        except asyncio.CancelledError:
            self.gone.set()
            raise


async def own_answer() -> str:
    return "own"


def forwarded(path: str) -> frozenset[str]:
    """The methods of a path, if pods answer it."""
    return frozenset({"GET", "POST"}) if path.startswith("/v1/") and path != "/v1/models" else frozenset()


def replace_limits(**changed: Any) -> Limits:
    """`LIMITS` with some changes."""
    return LIMITS.model_copy(update=changed)


def whole(body: bytes, status: int = 200, headers: HeaderList | None = None) -> Answer:
    """A response with a content-length."""

    async def answer(client: Exchange) -> None:
        length = (b"content-length", b"%d" % len(body))
        client.start(status, [length] if headers is None else headers)
        client.put(body)
        client.finish()

    return answer


async def echo(client: Exchange) -> None:
    """Answer with the request's body."""
    await whole(client.body)(client)


async def forever(client: Exchange) -> None:
    """Never answer."""
    await asyncio.Event().wait()


@asynccontextmanager
async def connected(
    edge: Any, *, keep_alive_s: float = 75
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's end of a connection to a server with this edge."""
    config = uvicorn.Config(edge, http=EdgeProtocol, ws="none", lifespan="off", log_config=None)
    config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]
    config.load()
    state, loop, others = ServerState(), asyncio.get_running_loop(), set(edge.connections)
    state.connections = edge.connections
    async with asyncio.timeout(DEADLINE_S):
        server = await loop.create_server(lambda: EdgeProtocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()
            server.close()
            while edge.connections - others:  # its end of a connection closes later, and must not outlive the loop
                await asyncio.sleep(0)


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/x", version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"host: h", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a response with a content-length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def test_a_connection_serves_one_request_after_another() -> None:
    """The edge and the application answer them in any order."""
    async with connected(Edge(echo)) as (reader, writer):
        for path, body, expected in ((b"/v1/x", b"a", b"a"), (b"/own", b"", b'"own"'), (b"/v1/x", b"b", b"b")):
            writer.write(post(body, path=path))
            head, answer = await read_answer(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer == expected


async def test_pipelined_requests_are_answered_in_order() -> None:
    """For any division of their bytes."""
    sent = post(b"a") + post(b"", path=b"/own") + post(b"b") + post(b"c")
    expected = [b"a", b'"own"', b"b", b"c"]
    for step in (1, 7, len(sent)):
        async with connected(Edge(echo)) as (reader, writer):
            for start in range(0, len(sent), step):
                writer.write(sent[start : start + step])
                await asyncio.sleep(0)
            assert [(await read_answer(reader))[1] for _ in expected] == expected


async def test_a_request_to_upgrade_is_answered_without_an_upgrade() -> None:
    """The next request is answered too, in the same piece or in another."""
    sent = b"GET /v1/x HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\nhost: h\r\n\r\n", post(b"next")
    for pieces in ((b"".join(sent),), sent):
        async with connected(Edge(echo)) as (reader, writer):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            assert [(await read_answer(reader))[1] for _ in sent] == [b"", b"next"]


async def test_path_query_headers_and_peer_reach_the_edge() -> None:
    """The path is decoded, the target is not. A local proxy may set x-forwarded-for."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        writer.write(post(b"", b"X-Forwarded-For: 10.1.2.3", path=b"/v1/a%20b?c=%20d"))
        await read_answer(reader)
    (client,) = edge.seen
    received = client.head
    assert (received.method, received.path, received.target) == ("POST", "/v1/a%20b", b"/v1/a%20b?c=%20d")
    assert received.peer == "10.1.2.3"
    assert (b"host", b"h") in received.headers


async def test_http_1_0_responses_end_with_the_connection() -> None:
    """Without chunks."""
    async with connected(Edge(whole(b"hello", headers=[]))) as (reader, writer):
        writer.write(post(b"", version=b"1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head and b"connection: close" in head
        assert body == b"hello"


@pytest.mark.parametrize(
    ("version", "headers", "shown"),
    [
        (b"1.1", [], b"3\r\nhel\r\n"),
        (b"1.1", [(b"content-length", b"5")], b"hel"),
        (b"1.0", [(b"content-length", b"5")], b"hel"),
        (b"1.0", [], None),
    ],
)
async def test_a_response_that_breaks_never_looks_complete(
    version: bytes, headers: HeaderList, shown: bytes | None
) -> None:
    """Nothing is appended; where the end of the connection ends the body, the connection is reset."""

    async def broken(client: Exchange) -> None:
        client.start(200, headers)
        client.put(b"hel")

    async with connected(Edge(broken)) as (reader, writer):
        writer.write(post(b"", version=version))
        if shown is None:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            assert (await reader.read()).partition(b"\r\n\r\n")[2] == shown


async def test_a_response_without_content_length_is_chunked() -> None:
    """The connection stays open."""
    async with connected(Edge(whole(b"hello", headers=[]))) as (reader, writer):
        for _ in range(2):
            writer.write(post(b""))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert await reader.readexactly(15) == b"5\r\nhello\r\n0\r\n\r\n"


async def test_connection_close_is_honoured() -> None:
    """Sent by the client."""
    async with connected(Edge(echo)) as (reader, writer):
        writer.write(post(b"a", b"Connection: close"))
        assert (await reader.read()).endswith(b"connection: close\r\n\r\na")


async def test_expect_100_continue_is_answered() -> None:
    """Once, before the body."""
    async with connected(Edge(echo)) as (reader, writer):
        message = post(b"a", b"Expect: 100-continue")
        writer.write(message[:-1])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(message[-1:])
        assert (await read_answer(reader))[1] == b"a"


async def test_a_body_with_a_too_large_content_length_is_refused() -> None:
    """Without reading it, also with expect: 100-continue."""
    async with connected(Edge(echo)) as (reader, writer):
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1001\r\nexpect: 100-continue\r\n\r\n")
        head, body = await read_answer(reader)
        assert (head[:12], body) == (b"HTTP/1.1 413", b"refused")


async def test_a_chunked_body_that_grows_too_large_is_refused() -> None:
    """It is not kept in memory, and the connection stays usable."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"1f4\r\n" + b"x" * 500 + b"\r\n1f4\r\n" + b"x" * 500 + b"\r\n1\r\nx\r\n")
        assert (await read_answer(reader))[1] == b"refused"
        assert isinstance(edge.seen[0].refusal, BodyTooLarge)
        assert edge.seen[0].body == b""
        writer.write(b"5\r\nxxxxx\r\n0\r\n\r\n" + post(b"next"))
        assert (await read_answer(reader))[1] == b"next"


async def test_a_body_that_fills_the_memory_exactly_is_served() -> None:
    edge = Edge(echo, memory_bytes=5)
    async with connected(edge) as (reader, writer):
        writer.write(post(b"exact"))
        assert (await read_answer(reader))[1] == b"exact"


async def test_the_total_size_of_bodies_is_limited() -> None:
    """Memory is freed when a request ends, however it ends."""
    edge = Edge(forever)
    async with connected(edge) as (_, one), connected(edge) as (_, other), connected(edge) as (reader, writer):
        one.write(post(b"x" * MAX_BYTES))
        other.write(post(b"x" * MAX_BYTES)[:-1])
        while edge.body_memory.bytes < 2 * MAX_BYTES - 1:
            await asyncio.sleep(0)
        writer.write(post(b"xx"))
        assert (await read_answer(reader))[1] == b"refused"
        assert isinstance(edge.seen[-1].refusal, Saturated)
        one.transport.abort()
        other.transport.abort()
        while edge.body_memory.bytes:
            await asyncio.sleep(0)
        edge.answer = echo
        writer.write(post(b"x" * MAX_BYTES))
        assert (await read_answer(reader))[1] == b"x" * MAX_BYTES
    assert edge.body_memory.bytes == 0


async def test_a_body_is_freed_when_its_response_begins() -> None:
    """No retry can need it after that."""
    held: list[int] = []

    async def answer(client: Exchange) -> None:
        held.append(edge.body_memory.bytes)
        client.start(200, [(b"content-length", b"1")])
        held.append(edge.body_memory.bytes)
        client.put(client.body + b"a")
        client.finish()

    edge = Edge(answer)
    async with connected(edge) as (reader, writer):
        writer.write(post(b"x" * 100))
        assert (await read_answer(reader))[1] == b"a"
    assert held == [100, 0]


async def test_a_disconnect_cancels_the_request() -> None:
    """Immediately."""
    edge = Edge(forever)
    async with connected(edge) as (_, writer):
        writer.write(post(b"a"))
        await edge.began.wait()
        writer.transport.abort()
        await edge.gone.wait()


async def test_nothing_is_written_to_a_client_that_is_gone() -> None:
    """Its pod may send more before the request's task is cancelled: an error would be logged for each."""
    done = asyncio.Event()

    async def answer(client: Exchange) -> None:
        client.start(200, [])
        connection = client._connection
        try:
            await asyncio.Event().wait()
        finally:
            open_transport, connection.transport = connection.transport, cast(asyncio.Transport, None)
            client.put(b"late")
            connection.transport = open_transport
            done.set()

    edge = Edge(answer)
    async with connected(edge) as (_, writer):
        writer.write(post(b"a"))
        await edge.began.wait()
        writer.transport.abort()
        await done.wait()


async def test_a_slow_client_pauses_the_response() -> None:
    """Until it has read what is buffered."""
    paused, done = asyncio.Event(), asyncio.Event()
    piece = b"x" * 16384

    async def answer(client: Exchange) -> None:
        client.start(200, [(b"content-type", b"text/event-stream")])
        while client.put(piece):
            pass
        paused.set()
        await client.ready()
        client.finish()
        done.set()

    async with connected(Edge(answer)) as (reader, writer):
        writer.write(post(b""))
        await paused.wait()
        assert not done.is_set()
        last = b""
        while not last.endswith(b"0\r\n\r\n"):
            last = last[-4:] + await reader.read(1 << 20)
        assert done.is_set()


async def test_large_pieces_of_many_responses_are_sent_in_turns() -> None:
    """At most one each time the loop runs, also while many pods send as fast as they can. Small ones need no turn."""
    runs, sent, done = 0, list[int](), asyncio.Event()
    loop = asyncio.get_running_loop()

    def count() -> None:
        nonlocal runs
        runs += 1
        if not done.is_set():
            loop.call_soon(count)

    async def answer(client: Exchange) -> None:
        client.start(200, [])
        assert client.put(b"small")
        for _ in range(4):
            assert not client.put(b"x" * 40_000)
            await client.ready()
            sent.append(runs)
        client.finish()

    edge = Edge(answer)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(edge)) for _ in range(5)]
        count()
        for _, writer in clients:
            writer.write(post(b"", b"connection: close"))
        bodies = await asyncio.gather(*(reader.read() for reader, _ in clients))
        done.set()
    assert len(sent) == len(set(sent)) == 20
    assert all(body.count(b"x") == 160_000 for body in bodies)


async def test_a_response_that_ends_too_soon_closes_the_connection() -> None:
    """Shorter than its content-length, or with an error after it began."""

    async def short(client: Exchange) -> None:
        client.start(200, [(b"content-length", b"5")])
        client.put(b"abc")
        client.finish()

    async def broken(client: Exchange) -> None:
        client.start(200, [])
        client.put(b"abc")

    for answer, expected in ((short, b"\r\n\r\nabc"), (broken, b"\r\n\r\n3\r\nabc\r\n")):
        async with connected(Edge(answer)) as (reader, writer):
            writer.write(post(b""))
            assert (await reader.read()).endswith(expected)


async def test_head_and_204_have_no_body() -> None:
    """Pieces of body are ignored."""
    for request, status in ((post(b"").replace(b"POST", b"HEAD"), 200), (post(b""), 204)):
        async with connected(Edge(whole(b"abc", status, headers=[]))) as (reader, writer):
            writer.write(request.replace(b"host: h", b"host: h\r\nconnection: close"))
            assert (await reader.read()).endswith(b"connection: close\r\n\r\n")


async def test_head_of_the_routers_own_endpoints_is_get_without_the_body() -> None:
    """With the same headers."""
    async with connected(Edge(echo)) as (reader, writer):
        for method, end in ((b"HEAD", b""), (b"GET", b'"own"')):
            writer.write(b"%b /v1/models HTTP/1.1\r\nhost: h\r\n\r\n" % method)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"content-length: 5\r\n" in head
            assert await reader.readexactly(len(end)) == end


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\n"])
async def test_a_response_header_with_a_line_break_is_refused(value: bytes) -> None:
    """Nothing is sent."""
    errors: list[Any] = []

    async def answer(client: Exchange) -> None:
        try:
            client.start(200, [(b"x-pod", value)])
        except ValueError as error:
            errors.append(error)

    async with connected(Edge(answer)) as (reader, writer):
        writer.write(post(b""))
        assert await reader.read() == b""
    assert errors


# --- rejected clients ---


LARGE = b"x" * 4 * 1024 * 1024
"""More than the buffers of two sockets."""


def upload(first: bytes, body: bytes = LARGE) -> bytes:
    """A request with this first line and headers, and a body of this size."""
    return first + b"host: h\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (upload(b"POST /v1/x HTTP/1.1\r\n"), b"413"),
        (upload(b"POST /v1/x HTTP/1.1\r\nconnection: close\r\n"), b"413"),
        (upload(b"POST /v1/x HTTP/1.0\r\n"), b"413"),
        (upload(b"POST /own HTTP/1.0\r\n"), b"413"),
        (upload(b"POST /v1/x HTTP/1.1\r\nx: y z\0\r\n"), b"999"),
        (b"POST /v1/x HTTP/1.1\r\nx: " + LARGE, b"999"),
        (b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nno size" + LARGE, b"413"),
    ],
    ids=["413", "closing", "HTTP/1.0", "application", "no header", "431", "no chunk"],
)
async def test_a_client_that_sends_its_whole_upload_reads_why_it_is_refused(sent: bytes, status: bytes) -> None:
    """A connection that is closed with unread bytes is reset, and the client loses what it has not read."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        for start in range(0, len(sent), 65536):
            writer.write(sent[start : start + 65536])
            await writer.drain()
        assert (await reader.readuntil(b"\r\n")).split()[1] == status
        writer.write_eof()
        await reader.read()
    assert not edge.newcomers.networks and not edge.body_memory.bytes


async def test_a_refused_upload_is_dropped_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the connection is closed, whether the client reads or not."""
    monkeypatch.setattr("router.frontends.http.protocol.DROPPED_BYTES", 100_000)
    async with connected(Edge(echo)) as (reader, writer):
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)


async def test_only_some_clients_may_go_on_sending_after_their_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that does so for the longest time is disconnected; others end their bodies and stay."""
    monkeypatch.setattr("router.frontends.http.client_deadlines.MIN_NEWCOMERS", 1)
    edge, free_places = Edge(echo, limits=replace_limits(max_body_bytes=2)), [9]
    edge.newcomers.free_places = lambda: free_places[0]
    head = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nxxx\r\n"
    async with connected(edge) as (reader, writer), connected(edge) as (other_reader, other):
        writer.write(head)
        assert (await read_answer(reader))[1] == b"refused"
        other.write(head)
        assert (await read_answer(other_reader))[1] == b"refused"
        free_places[0] = 0
        async with connected(edge):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            free_places[0] = 9
        other.write(b"0\r\n\r\n" + post(b"b"))
        assert (await read_answer(other_reader))[1] == b"b"


async def test_a_client_has_the_whole_timeout_for_each_mebibyte_of_a_body() -> None:
    """A large upload over a slow line is not cut while it makes progress."""
    edge = Edge(echo, replace_limits(max_body_bytes=4 * PROGRESS_BYTES), memory_bytes=4 * PROGRESS_BYTES)
    async with connected(edge) as (_, writer):
        head = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n"
        writer.write(head % (3 * PROGRESS_BYTES))
        began: list[float] = []
        for sent_bytes in (PROGRESS_BYTES - 1, 1, PROGRESS_BYTES - 1, 1):
            held_bytes = edge.body_memory.bytes + sent_bytes
            writer.write(b"x" * sent_bytes)
            while edge.body_memory.bytes < held_bytes:
                await asyncio.sleep(0)
            (protocol,) = edge.connections
            began.append(protocol._deadlines.waiting_since_s)
        begin, first, before_second, second = began
        assert begin < first == before_second < second


@pytest.mark.parametrize("path", [b"/v1/x", b"/own"])
async def test_each_response_has_one_date(path: bytes) -> None:
    """RFC 9110 6.6.1. That of a pod stays; else it is the router's."""
    edge = Edge(whole(b"", headers=[(b"date", b"the pod's"), (b"content-length", b"0")]))
    async with connected(edge) as (reader, writer):
        writer.write(post(b"", path=path))
        head = await reader.readuntil(b"\r\n\r\n")
        (date,) = [line for line in head.split(b"\r\n") if line.startswith(b"date: ")]
        age_s = time.time() - parsedate_to_datetime(date[6:].decode()).timestamp() if path == b"/own" else 0
        assert (date == b"date: the pod's") == (path == b"/v1/x") and -1 < age_s < DEADLINE_S


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"POST /v1/x HTTP/1.1\r\nx: " + b"a" * 300_000, "HeadersTooLarge"),
        (b"POST /" + b"a" * 300_000, "HeadersTooLarge"),
        (b"POST /v1/x HTTP/1.1\r\n" + b"a:\r\n" * 102, "HeadersTooLarge"),
        (b"no HTTP at all\r\n\r\n", "MalformedRequest"),
    ],
    ids=["one header", "the path", "many headers", "not HTTP"],
)
async def test_invalid_or_too_large_headers_are_refused(sent: bytes, error: str) -> None:
    """And the connection is closed."""
    async with connected(Edge(echo)) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b"HTTP/1.1 999 %b\r\n\r\n" % error.encode()


async def test_the_largest_number_of_headers_is_accepted() -> None:
    """`post` sends two more."""
    async with connected(Edge(echo, replace_limits(max_headers=16))) as (reader, writer):
        writer.write(post(b"a", *[b"a: b"] * 14))
        assert (await read_answer(reader))[1] == b"a"
        writer.write(post(b"b", *[b"a: b"] * 15))
        assert await reader.read() == b"HTTP/1.1 999 HeadersTooLarge\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/x", b"/own"])
@pytest.mark.parametrize("late_bytes", [0, 1])
async def test_an_idle_connection_keeps_no_request(path: bytes, late_bytes: int) -> None:
    """Its headers may have 64 KiB. The application may answer before the last byte of the body."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        sent = post(b"a", b"x: kept", path=path)
        if late_bytes and path == b"/own":
            writer.write(sent[:-late_bytes])
            await read_answer(reader)
            writer.write(sent[-late_bytes:])
            while edge.connections and next(iter(edge.connections)).last:
                await asyncio.sleep(0)
        else:
            writer.write(sent)
            await read_answer(reader)
        (protocol,) = edge.connections
        edge.seen.clear()
        assert not [name for name, value in vars(protocol).items() if "kept" in repr(value)]
        assert protocol.last is None
        writer.write(post(b"b", path=path))
        await read_answer(reader)


@pytest.mark.parametrize("path", [b"/v1/x", b"/own"])
async def test_requests_before_invalid_bytes_are_answered(path: bytes) -> None:
    """The edge answers one path, the application the other."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        head = b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % path
        writer.write(post(b"a") + post(b"b") + head + b"garbage")
        assert [(await read_answer(reader))[1] for _ in range(3)] == [b"a", b"b", b"refused"]
        assert await reader.read() == b""
    assert isinstance(edge.seen[-1].refusal, MalformedRequest)


@pytest.mark.parametrize("trailer", [b"x: " + b"a" * 1000 + b"\r\n", b"x:\r\n"])
async def test_endless_trailers_are_refused(trailer: bytes) -> None:
    """They count as headers."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        while not edge.seen:
            writer.write(trailer)
            await asyncio.sleep(0)
        assert isinstance(edge.seen[0].refusal, HeadersTooLarge)
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).endswith(b"refused")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"POST /v1/x HT", b"HTTP/1.1 999 RequestTimeout"),
        (post(b"abc")[:-1], b"HTTP/1.1 413"),  # the fake edge answers every refusal with 413
        (post(b"abc", path=b"/own")[:-1], b"HTTP/1.1 200"),  # this endpoint does not read its body
    ],
    ids=["head", "body", "body for the application"],
)
async def test_an_incomplete_request_is_refused_after_the_timeout(sent: bytes, answer: bytes) -> None:
    """And the connection is closed."""
    edge = Edge(echo, replace_limits(request_timeout_s=SOON_S))
    async with connected(edge) as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).startswith(answer)
        assert all(isinstance(seen.refusal, RequestTimeout) for seen in edge.seen)


async def test_a_slow_response_is_not_a_slow_request() -> None:
    """The timeout only covers what the client sends, also in a pipeline."""
    over = asyncio.Event()

    async def answer(client: Exchange) -> None:
        await over.wait()
        await echo(client)

    async with connected(Edge(answer, replace_limits(request_timeout_s=SOON_S))) as (reader, writer):
        asyncio.get_running_loop().call_later(5 * SOON_S, over.set)
        writer.write(post(b"a") + post(b"b")[:-1])
        assert (await read_answer(reader))[1] == b"a"
        assert (await reader.read()).endswith(b"refused")


@pytest.mark.parametrize("requests", [0, 1])
async def test_an_idle_connection_is_closed(requests: int) -> None:
    """Also one without any request."""
    edge = Edge(echo)
    async with connected(edge, keep_alive_s=DEADLINE_S if requests else SOON_S) as (reader, writer):
        if requests:
            writer.write(post(b"a"))
            await read_answer(reader)
            (protocol,) = edge.connections
            protocol._deadlines.shorten(SOON_S)
        assert await reader.read() == b""


async def test_a_request_that_begins_during_a_response_must_be_complete_in_time() -> None:
    """Its first bytes do not keep the connection open."""
    edge = Edge(echo, replace_limits(request_timeout_s=SOON_S))
    async with connected(edge) as (reader, writer):
        writer.write(post(b"a") + b"POST /v1/")
        assert (await read_answer(reader))[1] == b"a"
        assert (await reader.read()).startswith(b"HTTP/1.1 999 RequestTimeout")


def stops(edge: Edge) -> None:
    """The server is no longer ready."""
    for protocol in edge.connections:
        protocol.edge.is_stopping = True


def ends(edge: Edge) -> None:
    """Then it stops."""
    stops(edge)
    for protocol in list(edge.connections):
        protocol.shutdown()


@pytest.mark.parametrize("path", [b"/v1/x", b"/own"])
async def test_responses_of_a_stopping_server_close_their_connections(path: bytes) -> None:
    """So that clients connect to another router."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        writer.write(post(b"a"))
        assert b"connection: close" not in (await read_answer(reader))[0]
        stops(edge)
        writer.write(post(b"", path=path))
        assert b"connection: close" in (await read_answer(reader))[0]
        assert await reader.read() == b""


async def test_pipelined_requests_to_a_stopping_server_are_answered() -> None:
    """The last response closes the connection."""
    edge, go_on = Edge(echo), asyncio.Event()

    async def answer(client: Exchange) -> None:
        await go_on.wait()
        await echo(client)

    edge.answer = answer
    async with connected(edge) as (reader, writer):
        writer.write(post(b"a"))
        await edge.began.wait()
        stops(edge)
        writer.write(post(b"b") + post(b"c"))
        [protocol] = edge.connections
        while len(protocol.pipeline) < 2:
            await asyncio.sleep(0)
        go_on.set()
        answers = [await read_answer(reader) for _ in range(3)]
        assert [body for _, body in answers] == [b"a", b"b", b"c"]
        assert [b"connection: close" in head for head, _ in answers] == [False, False, True]
        assert await reader.read() == b""


@pytest.mark.parametrize("requests", [0, 1])
async def test_a_request_in_flight_when_the_server_stops_is_answered(requests: int) -> None:
    """Also the first request of a connection."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        for _ in range(requests):
            writer.write(post(b"a"))
            await read_answer(reader)
        while not edge.connections:
            await asyncio.sleep(0)
        ends(edge)
        writer.write(post(b"b"))
        head, body = await read_answer(reader)
        assert (body, b"connection: close" in head) == (b"b", True)
        assert await reader.read() == b""


async def test_idle_connections_are_closed_soon_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their last response did not announce it."""
    monkeypatch.setattr("router.frontends.http.protocol.LINGER_S", DEADLINE_S)
    edge, go_on = Edge(echo), asyncio.Event()

    async def answer(client: Exchange) -> None:
        client.start(200, [(b"content-length", b"2")])
        client.put(b"a")
        await go_on.wait()
        client.put(b"b")
        client.finish()

    edge.answer = answer
    async with connected(edge) as (reader, writer):
        writer.write(post(b""))
        assert (await reader.readuntil(b"\r\n\r\na")).startswith(b"HTTP/1.1 200")
        ends(edge)
        go_on.set()
        assert await reader.readexactly(1) == b"b"
        edge.answer = echo
        writer.write(post(b"c"))
        assert (await read_answer(reader))[1] == b"c"
        assert await reader.read() == b""
    monkeypatch.undo()
    async with connected(edge := Edge(echo)) as (reader, writer):
        while not edge.connections:
            await asyncio.sleep(0)
        ends(edge)
        assert await reader.read() == b""


def send_more_than_fits(client: Exchange) -> None:
    """Send more than the kernel holds for a client that reads nothing, also on a machine that lets buffers grow."""
    sock = client._connection.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    client.put(b"x" * (1 << 20))


def read_nothing(writer: asyncio.StreamWriter) -> None:
    """The client's part of it."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)


async def until_timers_are_gone() -> None:
    """All earlier timers have fired."""
    gone = asyncio.Event()
    asyncio.get_running_loop().call_later(3 * SOON_S, gone.set)
    await gone.wait()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_never_reads_is_disconnected(streams: bool) -> None:
    """During a response or after it."""
    put = asyncio.Event()

    async def answer(client: Exchange) -> None:
        await until_timers_are_gone()
        client.start(200, [])
        send_more_than_fits(client)
        put.set()
        if streams:
            await client.ready()
            raise AssertionError("the client never reads")
        client.finish()

    edge = Edge(answer, replace_limits(write_timeout_s=SOON_S))
    async with connected(edge) as (_, writer):
        read_nothing(writer)
        writer.write(post(b""))
        await put.wait()
        if streams:
            await edge.gone.wait()
        while edge.connections:
            await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [post(b"b"), post(b"", path=b"/own"), post(b"b")[:-1]])
async def test_a_disconnect_after_pipelined_requests_is_noticed(ahead: bytes) -> None:
    """While the first one is served. The others count as abandoned."""
    edge = Edge(forever)
    async with connected(edge) as (_, writer):
        writer.write(post(b"a") + ahead)
        await edge.began.wait()
        writer.transport.abort()
        await edge.gone.wait()
        assert edge.abandoned_paths == ([] if b"/own" in ahead else ["/v1/x"])


async def test_the_number_of_pipelined_requests_is_limited() -> None:
    """The connection is not read meanwhile; all requests are answered eventually."""
    first = asyncio.Event()

    async def answer(client: Exchange) -> None:
        await first.wait()
        await echo(client)

    edge = Edge(answer)
    async with connected(edge) as (reader, writer):
        for n in range(20):
            writer.write(post(b"%d" % n))
            await asyncio.sleep(0)
        await edge.began.wait()
        (protocol,) = edge.connections
        while not protocol.read_paused:
            await asyncio.sleep(0)
        first.set()
        assert [(await read_answer(reader))[1] for _ in range(20)] == [b"%d" % n for n in range(20)]


@pytest.mark.parametrize("path", [b"/v1/x", b"/own"])
async def test_a_flood_of_pipelined_requests_ends_the_connection(path: bytes) -> None:
    """After the responses to the first ones, so that parsing a piece never blocks the event loop for long."""
    async with connected(Edge(echo)) as (reader, writer):
        writer.write(post(b"", path=path) * 1000)
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 OK") == 1 + MAX_AHEAD
        assert answers.count(b"connection: close") == 1


async def test_tiny_pieces_of_a_body_need_little_memory() -> None:
    """Objects of Python are much larger than one byte."""

    async def answer(client: Exchange) -> None:
        await whole(b"%d" % len(client.body))(client)

    edge = Edge(answer, replace_limits(max_body_bytes=100_000), memory_bytes=100_000)
    async with connected(edge) as (reader, writer):
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" * 30_000)
        while edge.body_memory.bytes < 60_000:
            await asyncio.sleep(0)
        (protocol,) = edge.connections
        assert sum(map(sys.getsizeof, protocol.last.pieces)) < 2 * 60_000
        writer.write(b"0\r\n\r\n")
        assert (await read_answer(reader))[1] == b"60000"


async def test_a_disconnect_before_the_body_is_complete_is_counted() -> None:
    """As an abandoned request."""
    edge = Edge(echo)
    async with connected(edge) as (_, writer):
        writer.write(post(b"abc")[:-1])
        while not any(protocol.last for protocol in edge.connections):
            await asyncio.sleep(0)
        writer.transport.abort()
        while not edge.abandoned_paths:
            await asyncio.sleep(0)
        assert not edge.seen


@pytest.mark.parametrize("first", [post(b"a"), post(b"a")[:-1]])
async def test_a_connection_beyond_the_limit_is_refused(first: bytes) -> None:
    """With an error response, while all others are served or send a body. They are not affected."""
    may_end = asyncio.Event()

    async def answer(client: Exchange) -> None:
        await may_end.wait()
        await echo(client)

    edge = Edge(answer, replace_limits(max_connections=1))
    async with connected(edge) as (reader, writer):
        writer.write(first)
        while not any(protocol.last for protocol in edge.connections):
            await asyncio.sleep(0)
        other, other_writer = await asyncio.open_connection(*writer.get_extra_info("peername"))
        other_writer.write(post(b"b"))
        assert (await read_answer(other))[1] == b"refused"
        assert isinstance(edge.seen[-1].refusal, Saturated)
        other_writer.close()
        may_end.set()
        writer.write(post(b"a")[len(first) :])
        assert (await read_answer(reader))[1] == b"a"


@pytest.mark.parametrize("begun", [b"", b"POST /v1/x HTTP/1.1\r\nhost:"])
async def test_beyond_the_limit_the_connection_that_waits_longest_is_closed(begun: bytes) -> None:
    """One that waits for the next request."""
    edge = Edge(echo, replace_limits(max_connections=2))
    async with connected(edge) as (reader, writer):
        address = writer.get_extra_info("peername")
        writer.write(post(b"a"))
        await read_answer(reader)
        writer.write(begun)
        second, second_writer = await asyncio.open_connection(*address)
        second_writer.write(post(b"b"))
        assert (await read_answer(second))[1] == b"b"
        third, third_writer = await asyncio.open_connection(*address)
        third_writer.write(post(b"c"))
        assert (await read_answer(third))[1] == b"c"
        assert await reader.read() == b""
        for each, its_writer in ((third, third_writer), (second, second_writer)):
            its_writer.write(post(b"d"))
            assert (await read_answer(each))[1] == b"d"
            its_writer.close()


async def test_beyond_the_limit_a_slow_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not been complete for a while, for example of an attacker who holds all connections in this way. A
    request that is being served is not affected."""
    monkeypatch.setattr("router.frontends.http.protocol.SLOW_REQUEST_S", 0.0)
    may_end = asyncio.Event()

    async def answer(client: Exchange) -> None:
        if client.body == b"wait":
            await may_end.wait()
        await echo(client)

    edge = Edge(answer, replace_limits(max_connections=2))
    async with connected(edge) as (served, served_writer):
        address = served_writer.get_extra_info("peername")
        served_writer.write(post(b"wait"))
        slow, slow_writer = await asyncio.open_connection(*address)
        slow_writer.write(post(b"slow")[:-1])
        while sum(each.last is not None for each in edge.connections) < 2:
            await asyncio.sleep(0)
        third, third_writer = await asyncio.open_connection(*address)
        third_writer.write(post(b"b"))
        assert (await read_answer(third))[1] == b"b"
        assert (await read_answer(slow))[1] == b"refused" and await slow.read() == b""
        may_end.set()
        assert (await read_answer(served))[1] == b"wait"
        for each in (slow_writer, third_writer):
            each.close()


async def test_small_pieces_are_sent_at_once() -> None:
    """Nagle's algorithm is off."""
    edge = Edge(echo)
    async with connected(edge) as (reader, writer):
        writer.write(post(b"a"))
        await read_answer(reader)
        (protocol,) = edge.connections
        sock = protocol.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


GOOD = post(b"abc") + post(b"", path=b"/own")
NASTY = [
    b"\0",
    b"\r\n",
    b"\r\n\r\n",
    b"POST * HTTP/1.1",
    b"CONNECT h:1 HTTP/1.1\r\n\r\n",
    b"\xff",
    b"content-length: -1\r\n",
]
NASTY += [
    b"upgrade: websocket\r\nconnection: upgrade\r\n",
    b"transfer-encoding: chunked\r\n",
    b"HTTP/9.9",
    b" " * 9,
    b"%ff",
]


@given(
    at=st.integers(0, len(GOOD)),
    nasty=st.sampled_from(NASTY) | st.binary(max_size=8),
    dropped=st.integers(0, 20),
    places=st.lists(st.integers(0, len(GOOD)), max_size=5),
)
def test_any_bytes_are_answered_or_end_the_connection(at: int, nasty: bytes, dropped: int, places: list[int]) -> None:
    """No exception reaches the event loop, and every connection is closed."""
    raw, errors = GOOD[:at] + nasty + GOOD[at + dropped :], []

    async def talk() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        edge = Edge(echo, replace_limits(request_timeout_s=SOON_S))
        async with connected(edge, keep_alive_s=SOON_S) as (reader, writer):
            for start, end in pairwise(sorted({0, len(raw), *places})):
                writer.write(raw[start:end])
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert answer == b"" or answer.startswith(b"HTTP/1.1 ")

    asyncio.run(talk())
    assert not errors
