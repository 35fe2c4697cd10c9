"""A slow client leaves the response in the server and reads all of it in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from loadtest.fleets.slow_client import exchange_at_pace, slow_exchange
from loadtest.traffic.chat_workload import ChatSession, Turn
from loadtest.traffic.load_driver import drive
from router.errors import ConnectFailed, UpstreamBroken

pytestmark = [pytest.mark.net, pytest.mark.anyio]

DEADLINE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\nX-Warmroute-Pod: pod-1\r\ncontent-length: %d\r\n\r\n"


@asynccontextmanager
async def answering(write: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await write(writer)
        except ConnectionError:
            pass  # the client has disconnected
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(DEADLINE_S), server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_response_arrives_completely_in_small_pieces() -> None:
    """Nothing is lost or duplicated; header names are lower case."""
    body = bytes(range(256)) * 20

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % len(body) + body)

    async with answering(write) as url:
        answer = await slow_exchange(url, b"GET / HTTP/1.1\r\n\r\n", 0.0)
        pieces = []
        while piece := await answer.read():
            pieces.append(piece)
        answer.close()
    assert b"".join(pieces) == body
    assert len(pieces) > 5
    assert (answer.status, answer.headers[0]) == (200, (b"x-warmroute-pod", b"pod-1"))


async def test_unread_data_stays_in_the_server() -> None:
    """Most of 32 MiB stays in the server while the client pauses: its write ends only when the client disconnects."""
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % (32 << 20) + bytes(32 << 20))
        try:
            await writer.drain()
            outcome.set_result("all was written")
        except ConnectionError:
            outcome.set_result("the client has gone")

    async with answering(write) as url:
        answer = await slow_exchange(url, b"GET / HTTP/1.1\r\n\r\n", 60.0)
        assert await answer.read()
        assert not outcome.done()
        answer.close()
        assert await outcome == "the client has gone"


async def test_a_truncated_response_is_an_error() -> None:
    """Fewer bytes than announced."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % 100 + b"only this")

    async with answering(write) as url:
        answer = await slow_exchange(url, b"GET / HTTP/1.1\r\n\r\n", 0.0)
        assert await answer.read() == b"only this"
        with pytest.raises(UpstreamBroken):
            await answer.read()
        answer.close()


async def test_a_response_that_is_not_http_is_an_error() -> None:
    """The port belongs to another protocol."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp ready\r\n")

    async with answering(write) as url:
        with pytest.raises(UpstreamBroken):
            await slow_exchange(url, b"GET / HTTP/1.1\r\n\r\n", 0.0)


async def test_a_closed_port_is_a_failed_connection() -> None:
    """The next router may be tried."""

    async def write(writer: asyncio.StreamWriter) -> None:
        return None

    async with answering(write) as url:
        pass
    with pytest.raises(ConnectFailed):
        await slow_exchange(url, b"GET / HTTP/1.1\r\n\r\n", 0.0)


@pytest.mark.parametrize("read_pause_s", [0.0, 0.001])
async def test_a_session_with_pauses_gets_the_same_response(read_pause_s: float) -> None:
    """Only the pace differs."""
    body = b'data: {"choices": [{"delta": {"content": "Yes, sir"}}]}\n\n' * 50 + b"data: [DONE]\n\n"

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % len(body) + body)

    session = ChatSession("a", "chat", 0.0, "", (Turn("Why?", 3),), read_pause_s)
    async with answering(write) as url:
        (one,) = (await drive(url, "demo", [session], exchange=exchange_at_pace)).served
    assert (one.text, one.error, one.pod) == ("Yes, sir" * 50, "", "pod-1")
