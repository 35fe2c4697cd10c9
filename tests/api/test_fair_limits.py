"""A client that uses up a limit of the router does not keep the others out: over sockets, for each limit."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, cast

import pytest

from router.admission.gate import AdmissionGate
from router.admission.quotas import Quota
from router.admission.tenant import KeyGrant, Tenant, Tenants
from router.config.schema import Limits
from router.errors import Saturated, ShareExceeded
from router.frontends.http import exchange
from router.frontends.http.client_deadlines import MIN_NEWCOMERS, Newcomers
from router.frontends.http.exchange import Exchange
from router.frontends.http.server import TlsListener
from router.request.context import RequestContext
from tests.api.test_openai_edge import make_edge
from tests.api.test_protocol import (
    MAX_BYTES,
    Edge,
    connected,
    echo,
    forever,
    post,
    read_answer,
)
from tests.kit.cores import CoreOfPods
from tests.kit.deadlines import DEADLINE_S, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]
EVIL, GOOD = b"x-forwarded-for: 10.0.0.1", b"x-forwarded-for: 10.0.0.2"
"""Two clients behind a trusted proxy, which is this machine."""
HELD = b"stay"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def stays_or_echo(client: Exchange) -> None:
    """An answer that never comes to those who ask for it."""
    await (forever if client.body == HELD else echo)(client)


class Clients:
    """Further connections to the same listener, closed in the end."""

    def __init__(self, address: tuple[str, int], stack: AsyncExitStack) -> None:
        self._address = address
        self._stack = stack

    async def send(self, data: bytes) -> Streams:
        reader, writer = await asyncio.open_connection(*self._address[:2])
        self._stack.callback(writer.close)
        writer.write(data)
        return reader, writer

    async def answer(self, data: bytes) -> tuple[bytes, bytes]:
        return await read_answer((await self.send(data))[0])


@asynccontextmanager
async def clients(edge: Any) -> AsyncIterator[Clients]:
    async with connected(edge) as (_, writer), AsyncExitStack() as stack:
        yield Clients(writer.get_extra_info("peername"), stack)


# --- memory for bodies ---


def endless(who: bytes) -> bytes:
    """A body whose last byte never comes."""
    return post(b"x" * MAX_BYTES, who)[:-1]


async def test_bodies_that_never_end_leave_memory_for_others() -> None:
    """And their client gets no more of it while others have some."""
    edge = Edge(stays_or_echo, memory_bytes=16 * MAX_BYTES)
    async with clients(edge) as to:
        for _ in range(16):
            await to.send(endless(EVIL))
        await until(lambda: edge.body_memory.bytes == 16 * (MAX_BYTES - 1))
        for _ in range(3):
            assert (await to.answer(post(b"y" * MAX_BYTES, GOOD)))[1] == b"y" * MAX_BYTES
        await to.send(post(HELD, GOOD))
        await edge.began.wait()
        await until(lambda: len(edge.seen) == 4)
        assert (await to.answer(post(b"x" * MAX_BYTES, EVIL)))[1] == b"refused"
        assert isinstance(edge.seen[-1].refusal, ShareExceeded)
    await until(lambda: edge.body_memory.bytes == 0)
    assert not edge.body_memory.arriving and edge.body_memory.bound.part("10.0.0.1") == 0


def holds(edge: Any, bodies: int) -> bool:
    """Whether the good client holds the memory of this number of bodies."""
    return bool(edge.body_memory.bound.part("10.0.0.2") == bodies * MAX_BYTES)


async def test_slow_bodies_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the client that holds the most, until the other one has its share."""
    monkeypatch.setattr(exchange, "SLOW_REQUEST_S", 0.0)
    edge = Edge(forever, memory_bytes=8 * MAX_BYTES)
    async with clients(edge) as to:
        for _ in range(8):
            await to.send(endless(EVIL))
        await until(lambda: edge.body_memory.bytes == 8 * (MAX_BYTES - 1))
        for count in range(1, 5):
            await to.send(post(b"y" * MAX_BYTES, GOOD))
            await until(partial(holds, edge, count))
        await until(lambda: len(edge.seen) == 8)
        dropped = [received.refusal for received in edge.seen if received.refusal is not None]
        assert len(dropped) == 4 and all(isinstance(refusal, Saturated) for refusal in dropped)
        assert edge.body_memory.bound.part("10.0.0.1") == 4 * (MAX_BYTES - 1)


# --- connections; what ends when all are in use: tests/api/test_client_places.py ---


# --- requests in flight ---

KEYS = {"evil": b"sk-evil", "good": b"sk-good"}


def gate_of(*quotas: Quota) -> AdmissionGate:
    """Two tenants with these quotas and a key each."""
    tenants = {name: Tenant(name=name, quotas=quotas) for name in KEYS}
    grants = {sha256(key).digest(): KeyGrant(tenants[name], math.inf) for name, key in KEYS.items()}
    found = Tenants(tenants, grants)
    return AdmissionGate(lambda: found)


CHAT = b'{"model":"m","messages":[{"role":"user","content":"Hello"}]}'


def chat(name: str) -> bytes:
    headers = b"authorization: Bearer " + KEYS[name], b"content-type: application/json"
    return post(CHAT, *headers, path=b"/v1/chat/completions")


RUNNING: list[RequestContext] = []
"""Streams of the tenant `evil` that have begun."""


async def serve_good(context: RequestContext, client: Exchange) -> None:
    if context.tenant.name == "evil":
        RUNNING.append(context)
        await asyncio.Event().wait()
    client.start(200, [(b"content-length", b"0")])
    client.put(b"")
    client.finish()


def edge_for(gate: AdmissionGate, **limits: int) -> Any:
    edge = cast(Any, make_edge(core=CoreOfPods([]), limits=Limits(**limits), forward=serve_good, gate=gate))
    edge.connections = set()
    return edge


async def status_of(to: Clients, data: bytes) -> int:
    return int((await to.answer(data))[0].split(b" ")[1])


async def test_long_streams_of_one_tenant_leave_room_for_others() -> None:
    """One tenant alone may have as many as the router serves."""
    edge = edge_for(gate_of(), max_in_flight=16)
    RUNNING.clear()
    async with clients(edge) as to:
        streams = [await to.send(chat("evil")) for _ in range(16)]
        await until(lambda: len(RUNNING) == 16)
        assert await status_of(to, chat("evil")) == 503
        for _ in range(3):
            assert await status_of(to, chat("good")) == 200
        edge.in_flight.add("good", 1.0, 1)
        assert await status_of(to, chat("evil")) == 429
        for _, writer in streams[:9]:
            writer.close()
        await until(lambda: edge.in_flight.used == 8)
        await to.send(chat("evil"))
        await until(lambda: edge.in_flight.used == 9)
        edge.in_flight.give_back("good", 1)
    await until(lambda: edge.in_flight.used == 0)


async def test_a_request_is_concurrent_from_its_head_on() -> None:
    """One whose body never ends counts as much as one that is served; it does not when its client leaves."""
    edge = edge_for(gate_of(Quota(concurrent_requests=1)))
    async with clients(edge) as to:
        _, writer = await to.send(chat("good")[:-1])
        await until(lambda: any(each.last for each in edge.connections))
        assert await status_of(to, chat("good")) == 429
        writer.close()
        await until(lambda: not any(each.last for each in edge.connections))
        for _ in range(3):
            assert await status_of(to, chat("good")) == 200


# --- TLS handshakes ---


async def test_handshakes_of_one_client_end_none_of_another() -> None:
    """Where no connection is left, few handshakes are possible at a time."""
    sock = socket.create_server(("127.0.0.1", 0))
    listener = TlsListener(sock, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), asyncio.Protocol, Newcomers(lambda: 0))
    listener.open(100)
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        stack.callback(sock.close)
        stack.callback(listener.close)

        async def connect(host: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(*sock.getsockname(), local_addr=(host, 0))
            stack.callback(writer.close)
            return reader

        good = await connect("127.0.0.2")
        evil = [await connect("127.0.0.1") for _ in range(4 * MIN_NEWCOMERS)]
        await until(lambda: sum(reader.at_eof() for reader in evil) == len(evil) - MIN_NEWCOMERS + 1)
        assert not good.at_eof()
