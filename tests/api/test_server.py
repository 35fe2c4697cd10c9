"""A stopping server answers clients that have connected."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from router.config.schema import Limits
from router.frontends.http.app import bare_app
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.protocol import EdgeProtocol
from router.frontends.http.server import DrainingServer, SocketServer, bind_port
from tests.api.test_protocol import Edge, echo, post, read_answer
from tests.kit.deadlines import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@asynccontextmanager
async def started(delay_s: float) -> AsyncIterator[tuple[DrainingServer, HttpEdge, socket.socket]]:
    """A server that accepts connections, and its socket."""
    app = Edge(echo)
    config = uvicorn.Config(app, http=EdgeProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    admin = SocketServer(HttpEdge(Limits(), bare_app()), bind_port("127.0.0.1", 0))
    server = DrainingServer(config, admin, delay_s=delay_s)
    server.lifespan = config.lifespan_class(config)
    ours = socket.create_server(("127.0.0.1", 0))
    async with asyncio.timeout(DEADLINE_S):
        await server.startup([ours])
        yield server, app, ours


async def answer_over(connection: socket.socket) -> tuple[bytes, bytes]:
    """Send a request; head and body of its response."""
    connection.sendall(post(b"a"))
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    answer = await read_answer(reader)
    writer.close()
    return answer


async def test_a_connection_in_the_listening_queue_is_answered() -> None:
    """The kernel completes connections before the server accepts them."""
    async with started(delay_s=0) as (server, _, ours):
        ended = asyncio.ensure_future(server.shutdown([ours]))
        await asyncio.sleep(0)  # the server is about to close its socket
        with socket.create_connection(ours.getsockname()) as theirs:
            head, body = await answer_over(theirs)
            assert (body, b"connection: close" in head) == (b"a", True)
            await ended


async def test_after_sigterm_connections_are_accepted_for_the_delay() -> None:
    """The router is not ready any more, and each response ends its connection."""
    async with started(delay_s=0.3) as (server, app, ours):
        server.handle_exit(signal.SIGTERM, None)
        assert app.is_stopping and server.should_exit
        began_s = asyncio.get_running_loop().time()
        ended = asyncio.ensure_future(server.shutdown([ours]))
        await asyncio.sleep(0.1)
        with socket.create_connection(ours.getsockname()) as theirs:
            head, body = await answer_over(theirs)
        assert (body, b"connection: close" in head) == (b"a", True)
        await ended
        assert asyncio.get_running_loop().time() - began_s >= 0.3


@pytest.mark.parametrize("signals", [[signal.SIGINT], []])
async def test_without_sigterm_there_is_no_delay(signals: list[signal.Signals]) -> None:
    """The router stops being ready when it shuts down."""
    async with started(delay_s=1000) as (server, app, ours):
        for number in signals:
            server.handle_exit(number, None)
        assert not app.is_stopping
        await server.shutdown([ours])
        assert app.is_stopping
