"""Clients and pods that send nonsense, too much or too slowly harm nobody but themselves."""

from __future__ import annotations

import asyncio
import gc
import gzip
import http.client
import json
import socket
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from urllib.parse import urlsplit
from weakref import ref

import httpx
import pytest

from loadtest.mock_engine import mock_responses
from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.schema import Limits
from router.engines.prometheus import METRICS
from tests.api.test_encoded_bodies import zstd
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import SLOW, Chat, Deploy, Deployment, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- requests that are not plain JSON with a model ---


ASKED: Chat = [{"role": "user", "content": "Hi"}]
BODY = json.dumps({"model": "demo", "messages": ASKED, "max_tokens": 4}).encode()
NAMELESS = json.dumps({"messages": ASKED, "max_tokens": 4}).encode()


WAYS: dict[str, tuple[bytes, dict[str, str]]] = {
    "no type": (BODY, {}),
    "gzip": (gzip.compress(BODY), {"content-encoding": "gzip"}),
    "zstd": (zstd.compress(BODY), {"content-encoding": "zstd", "accept-encoding": "zstd"}),
    "marked": (BOM_UTF8 + BODY, {"content-type": "application/json; charset=utf-8"}),
    "no model": (NAMELESS, {"content-type": "application/json"}),
    "all of it": (gzip.compress(BOM_UTF8 + NAMELESS), {"content-encoding": "gzip"}),
}


async def test_a_chat_is_answered_however_it_is_sent(deploy: Deploy) -> None:
    """With the model that served it."""
    async with deploy(pods=1) as deployment:
        for way, (body, headers) in WAYS.items():
            answer = await deployment.client.post("/v1/chat/completions", content=body, headers=headers)
            assert (answer.status_code, answer.json().get("model")) == (200, "demo"), (way, answer.text)
            assert "date" in answer.headers and "content-encoding" not in answer.headers


def upload(url: str, size_bytes: int) -> tuple[int, str | None]:
    """The status of an upload with Python's own client, which reads it when everything is sent."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", b"x" * size_bytes, {"connection": "close"})
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


async def test_a_client_that_reads_at_the_end_of_its_upload_gets_the_413(deploy: Deploy) -> None:
    """The router reads and drops what is sent after its answer."""
    async with deploy(pods=1, limits=Limits(max_body_bytes=1000)) as deployment:
        assert await asyncio.to_thread(upload, deployment.url, 16 * 1024 * 1024) == (413, "close")


# --- clients that do not read ---


MIB = 1024 * 1024
RESPONSE_BYTES = 4 * MIB - 4096
UNREAD = b'{"model":"demo","messages":[{"role":"user","content":"x"}]}'
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
    await loop.sock_sendall(sock, REQUEST + b"content-length: %d\r\n\r\n" % len(UNREAD) + UNREAD)


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


# --- clients that leave ---


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the cycle collector for the test."""
    gc.disable()
    yield
    gc.enable()


async def visit(deployment: Deployment, *, leave: bool) -> list[ref[object]]:
    """One client with its own connection reads a stream to the end, or leaves after its first piece. Returns the
    router's objects for it: both ends of the connection and the tasks."""
    assert deployment.server
    body = {"model": "demo", "messages": opening("dunes"), "max_tokens": 20, "stream": True}
    before = set(deployment.server.server_state.connections)
    async with (
        httpx.AsyncClient(base_url=deployment.url, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        connections = deployment.server.server_state.connections - before
        left: list[ref[object]] = [ref(one) for one in (*connections, *deployment.server.server_state.tasks)]
        async for _ in answer.aiter_raw():
            if leave:
                break
    return left


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("leave", [False, True])
async def test_disconnected_clients_leave_no_reference_cycles(deploy: Deploy, leave: bool) -> None:
    """Neither complete nor abandoned streams."""
    async with deploy(pods=1, engine=SLOW) as deployment:
        for _ in range(2):
            left = await visit(deployment, leave=leave)
            assert len(left) == 2
            await deployment.until(lambda left=left: not any(one() for one in left))


# --- pods ---


UNQUOTED = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{' + b"a" * 60_000 + b"} 1\n"
WAITING = b"".join(b'vllm:num_requests_waiting{engine="%d"} 1e308\n' % rank for rank in range(4))
ENORMOUS = b"#" * METRICS.max_bytes
WHOLE_PAGES = {"metrics_filter": "ignored"}
"""A pod that filters its metrics would send little."""


@pytest.fixture
def first_pod_reports(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the metrics of the first pod that is asked begin with; empty for nothing."""
    prefix, asked = list[bytes](), list[object]()
    real = mock_responses.metrics_body

    def evil(config: object, pod: object, *more: object) -> bytes:
        asked.append(pod)
        body: bytes = real(config, pod, *more)  # type: ignore[arg-type]
        return b"".join(prefix) + body if pod is asked[0] else body

    monkeypatch.setattr(mock_responses, "metrics_body", evil)
    return prefix


async def test_a_pod_that_reports_nonsense_serves_every_chat(deploy: Deploy, first_pod_reports: list[bytes]) -> None:
    async with deploy(pods=1, engine=WHOLE_PAGES) as deployment:
        for page in (WAITING, UNQUOTED, ENORMOUS):
            first_pod_reports[:] = [page]  # once the pod is trusted: an ejected one would not become so
            for number in range(3):
                assert (await deployment.chat(opening(f"evil {number}"))).status_code == 200
