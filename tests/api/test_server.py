"""A stopping server answers clients that have connected."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest
import uvicorn
from fastapi import FastAPI

from router.api.app import App
from router.api.openai_edge import OpenAiEdge
from router.api.protocol import EdgeProtocol
from router.api.server import DrainingServer
from tests.api.test_protocol import DEADLINE_S, Edge, echo, post, read_answer

pytestmark = [pytest.mark.anyio, pytest.mark.net]


async def test_a_connection_in_the_listening_queue_is_answered() -> None:
    """The kernel completes connections before the server accepts them."""
    app = App(cast(OpenAiEdge, Edge(echo)), FastAPI(openapi_url=None))
    config = uvicorn.Config(app, http=EdgeProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    server = DrainingServer(config, delay_s=0)
    server.lifespan = config.lifespan_class(config)
    ours = socket.create_server(("127.0.0.1", 0))
    async with asyncio.timeout(DEADLINE_S):
        await server.startup([ours])
        with socket.create_connection(ours.getsockname()) as theirs:
            theirs.sendall(post(b"a"))
            ended = asyncio.ensure_future(server.shutdown([ours]))
            theirs.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=theirs)
            head, body = await read_answer(reader)
            assert (body, b"connection: close" in head) == (b"a", True)
            writer.close()
            await ended
