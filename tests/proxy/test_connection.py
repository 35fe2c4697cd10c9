"""Any bytes of a pod, in any pieces, are a response or one of our errors, and never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RouterError, UpstreamBroken
from router.frontends.http.connection import READ_PAUSE_BYTES, Connection
from router.frontends.http.upstream import UpstreamPool
from tests.kit.deadlines import DEADLINE_S, GENEROUS

BODY = b'data: {"a": 1}\n\ndata: [DONE]\n\n'
ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (BODY[:5], len(BODY) - 5, BODY[5:]),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"HTTP/1.0 200 OK\r\nx: y\r\n\r\n" + BODY,
]


class Transport(asyncio.Transport):
    """Drops what is sent; records whether it is open and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.reads = True

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        self.open = False

    def is_closing(self) -> bool:
        return not self.open

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


async def received(pieces: list[bytes], *, pours: bool) -> tuple[int, bytes]:
    """Status and body of what a pod sends before it closes. Raises `RouterError`."""
    transport = Transport()
    connection = Connection(asyncio.get_running_loop(), GENEROUS)
    connection.connection_made(transport)
    connection.send(b"a request")
    got: list[bytes] = []

    def take(piece: bytes) -> bool:
        got.append(piece)
        return len(got) % 2 == 0

    async def read() -> None:
        await connection.head()
        if pours:
            await connection.pour(take, lambda: asyncio.sleep(0))
        else:
            while piece := await connection.read():
                got.append(piece)

    reading = asyncio.ensure_future(read())
    for piece in pieces:
        while not transport.reads and not reading.done():
            await asyncio.sleep(0)
        if transport.open:
            connection.data_received(piece)
        await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.wait_for(reading, DEADLINE_S)
    return connection.status, b"".join(got)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """The bytes in pieces."""
    ends = sorted({place % (len(raw) + 1) for place in places} | {0, len(raw)})
    return [raw[start:end] for start, end in pairwise(ends)]


places = st.lists(st.integers(0, 10_000), max_size=12)


@given(answer=st.sampled_from(ANSWERS), places=places, pours=st.booleans())
def test_a_response_does_not_depend_on_how_it_is_cut(answer: bytes, places: list[int], pours: bool) -> None:
    """Inside a header, a chunk size, a line end."""
    assert asyncio.run(received(cut(answer, places), pours=pours)) == (200, BODY)


@given(
    answer=st.sampled_from(ANSWERS),
    at=st.integers(0, 200),
    garbage=st.binary(max_size=12)
    | st.sampled_from([b"\r\n\r\n", b"HTTP/1.1 600 X\r\n\r\n", b"\0", b"ffffffffffffffffff\r\n"]),
    dropped=st.integers(0, 40),
    places=places,
    pours=st.booleans(),
)
def test_a_garbled_response_is_read_or_one_of_our_errors(
    answer: bytes, at: int, garbage: bytes, dropped: int, places: list[int], pours: bool
) -> None:
    """No other exception, no endless wait."""
    garbled = answer[:at] + garbage + answer[at + dropped :]
    with contextlib.suppress(RouterError):
        status, _ = asyncio.run(received(cut(garbled, places), pours=pours))
        assert 200 <= status < 600


@given(
    raw=st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"HTTP/1.1 200 OK\r\n" + tail), places=places
)
def test_any_bytes_are_a_response_or_one_of_our_errors(raw: bytes, places: list[int]) -> None:
    """Also bytes that are not HTTP."""
    with contextlib.suppress(RouterError):
        asyncio.run(received(cut(raw, places), pours=False))


OK = b"HTTP/1.1 200 OK\r\n"
WITH_LENGTH = OK + b"content-length: 3\r\n\r\nabc"
AMBIGUOUS = {
    "length twice": OK + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "length as a list": OK + b"content-length: 3, 3\r\n\r\nabc",
    "length and chunks": OK + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "chunks and length": OK + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "length in a trailer": OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\ncontent-length: 3\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\ncontent-length: 3\n\nabc",
    "folded header": OK + b"x: a\r\n b\r\ncontent-length: 3\r\n\r\nabc",
    "another protocol": b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + WITH_LENGTH,
    "another protocol, unnamed": b"HTTP/1.1 101 S\r\n\r\n" + WITH_LENGTH,
    "body of an interim response": b"HTTP/1.1 103 E\r\ncontent-length: 3\r\n\r\nabc" + WITH_LENGTH,
}


@pytest.mark.parametrize("pours", [False, True])
@pytest.mark.parametrize("answer", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_response_whose_end_is_ambiguous_is_an_error(answer: bytes, pours: bool) -> None:
    """In one piece and in single bytes."""
    for pieces in ([answer], [answer[at : at + 1] for at in range(len(answer))]):
        with pytest.raises(UpstreamBroken):
            asyncio.run(received(pieces, pours=pours))


@pytest.mark.anyio
@pytest.mark.parametrize("after", [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"x", b"\0"])
@pytest.mark.parametrize("later", [False, True], ids=["in the same piece", "later"])
async def test_bytes_after_a_response_never_become_the_next_response(after: bytes, later: bool) -> None:
    """The connection is closed; the response before is delivered."""
    transport = Transport()
    connection = Connection(asyncio.get_running_loop(), GENEROUS)
    connection.connection_made(transport)
    connection.send(b"a request")
    connection.data_received(WITH_LENGTH if later else WITH_LENGTH + after)
    await connection.head()
    assert (await connection.read(), await connection.read()) == (b"abc", b"")
    if later:
        assert connection.reusable
        connection.data_received(after)
    assert not connection.reusable and not transport.open


@pytest.mark.anyio
async def test_trailers_and_headers_of_interim_responses_are_dropped() -> None:
    """The response has the headers of its own head."""
    connection = Connection(asyncio.get_running_loop(), GENEROUS)
    connection.connection_made(Transport())
    connection.send(b"a request")
    connection.data_received(
        b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK + b"transfer-encoding: chunked\r\n\r\n"
    )
    connection.data_received(b"3\r\nabc\r\n0\r\nset-cookie: a\r\n\r\n")
    await connection.head()
    assert connection.headers == [(b"transfer-encoding", b"chunked")]
    assert (await connection.read(), connection.reusable) == (b"abc", True)


def test_reading_pauses_when_a_pod_sends_faster_than_it_is_read() -> None:
    """Also with small chunks."""
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk * 200 + b"0\r\n\r\n"
    pieces = [raw[at : at + 1000] for at in range(0, len(raw), 1000)]
    assert len(raw) > 2 * READ_PAUSE_BYTES
    assert asyncio.run(received(pieces, pours=False)) == (200, b"x" * 4096 * 200)


@pytest.mark.anyio
@pytest.mark.net
async def test_small_messages_are_sent_at_once() -> None:
    """Nagle's algorithm is off."""

    over = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        over.set()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        pool = UpstreamPool("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", GENEROUS)
        connection = await pool._connect()
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()
        await over.wait()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
CALL_BYTES = 4096
"""What one call of the loop receives here."""


@pytest.mark.parametrize(
    "framing",
    [b"0\r\n" + b"a: b\r\n" * 200_000, b"0\r\na: " + b"b" * 1_200_000, b"5;" + b"x" * 1_200_000],
    ids=["trailers", "one trailer", "the extension of a chunk"],
)
@pytest.mark.parametrize("pours", [True, False])
@pytest.mark.anyio
async def test_framing_without_an_end_is_an_error(framing: bytes, *, pours: bool) -> None:
    """It would be kept in memory, and no timeout ends it: bytes arrive."""
    pieces = [CHUNKED, *(framing[at : at + CALL_BYTES] for at in range(0, len(framing), CALL_BYTES))]
    with pytest.raises(UpstreamBroken, match="limit"):
        await received(pieces, pours=pours)


@pytest.mark.anyio
async def test_a_long_body_with_little_in_a_chunk_is_read() -> None:
    """Its framing is longer than the limit for trailers, and than its body."""
    chunk = b"1;%b\r\nx\r\n" % (b"e" * 1000)
    pieces = [CHUNKED, *([chunk] * (READ_PAUSE_BYTES // 500)), b"0\r\n\r\n"]
    status, body = await received(pieces, pours=True)
    assert (status, len(body)) == (200, 5 + READ_PAUSE_BYTES // 500)


@pytest.mark.anyio
async def test_a_response_has_a_limited_number_of_headers() -> None:
    """Each is a call of Python: 40,000 fit into one read."""
    head = b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 2000 + b"\r\n"
    with pytest.raises(UpstreamBroken):
        await received([head], pours=False)
