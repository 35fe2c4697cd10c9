"""What clients do not read fills no memory beyond its bound."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, closing
from urllib.parse import urlsplit

import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.schema import Limits
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

MIB = 1024 * 1024
RESPONSE_BYTES = 4 * MIB - 4096
BODY = b'{"model":"demo","messages":[{"role":"user","content":"x"}]}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
CLIENTS = 30


async def asked(deployment: Deployment, stack: AsyncExitStack) -> None:
    """A client sends a request, and reads nothing."""
    url = urlsplit(deployment.url)
    sock = stack.enter_context(closing(socket.socket()))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (url.hostname, url.port))
    await loop.sock_sendall(sock, REQUEST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)


def buffered(deployment: Deployment) -> int:
    """Bytes of responses that wait in the router for clients."""
    assert deployment.server is not None
    clients: set[object] = set(deployment.server.server_state.connections)
    return sum(one.transport.get_write_buffer_size() for one in clients)  # type: ignore[attr-defined]


async def test_responses_that_nobody_reads_are_held_within_the_limit(deploy: Deploy) -> None:
    """Each could be held until it is whole: 4 MiB times the requests in flight."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {RESPONSE_BYTES}\r\n\r\n"
    fault = Fault(kind=FaultKind.RAW, raw=head + "1" * RESPONSE_BYTES, count=None)
    limits = Limits(max_held_bytes=16 * MIB)
    async with deploy(pods=1, limits=limits) as deployment:
        memory = deployment.program.edge.body_memory
        deployment.engines[0].inject(fault)
        async with AsyncExitStack() as stack:
            for _ in range(CLIENTS):
                await asked(deployment, stack)
            await deployment.until(lambda: memory.bytes > 14 * MIB)
            for _ in range(100):
                await asyncio.sleep(0.01)
                assert memory.bytes <= 18 * MIB and buffered(deployment) <= 18 * MIB + CLIENTS * MIB // 2
        await deployment.until(lambda: memory.bytes == 0)
