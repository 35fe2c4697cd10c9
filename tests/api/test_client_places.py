"""Whose connections lose their places when all are taken: those of the client with the most, in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from router.admission.gate import AdmissionGate
from router.admission.quotas import Quota
from router.config.credentials import BearerFile
from router.config.schema import Limits
from router.frontends.admin.admin_access import AdminEdge
from router.frontends.http.client_deadlines import MIN_NEWCOMERS
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.protocol import EdgeProtocol
from router.request.context import RequestContext
from tests.api.test_fair_limits import CHAT, chat, gate_of
from tests.api.test_openai_edge import make_edge
from tests.kit.cores import CoreOfPods

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

PLACES = 64
EVIL, GOOD = "10.0.0.1", "10.0.0.2"
HEAD_S = 0.001
"""From a connection to its first head."""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"
UPLOAD = HEAD + b"content-length: 9\r\n\r\n{"
"""A client without a key sends it, and never the rest of the body."""


class Wire(asyncio.Transport):
    """The router's end of a connection in memory."""

    def __init__(self, network: Network, host: str) -> None:
        super().__init__({"peername": (host, 1), "socket": network.quiet})
        self._network = network
        self.written = b""
        self.ended = self.is_closing_slowly = False
        """Whether the router closed the connection."""
        self.unread_bytes = 0
        """Bytes of responses that wait for the client."""
        self.protocol = network.protocol()
        self.protocol.connection_made(self)

    def send(self, data: bytes) -> Wire:
        self.protocol.data_received(data)
        return self

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def is_closing(self) -> bool:
        return self.ended or self.is_closing_slowly

    def close(self) -> None:
        """With TLS, the connection is lost when the client closes it too."""
        self.is_closing_slowly = True
        if not self._network.uses_tls:
            self.abort()

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
            self._network.on_end(self)

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing: a test sends what it wants."""

    resume_reading = pause_reading

    @property
    def status(self) -> int:
        """That of the first response, 0 before it."""
        return int(self.written[9:12] or 0)


def own_pods() -> FastAPI:
    own = FastAPI(openapi_url=None)

    @own.get("/admin/pods")
    async def pods() -> str:
        return "pods"

    return own


class Network:
    """Clients' connections to one router with `PLACES` connections."""

    def __init__(self, gate: AdmissionGate | None = None, edge: HttpEdge | None = None, **limits: int) -> None:
        self.uses_tls = False
        self.quiet, self.other = socket.socketpair()
        """The socket that all connections seem to have. Whether bytes wait there to be read is asked."""
        self.on_end: Callable[[Wire], object] = lambda _: None
        limited = Limits(max_connections=PLACES, **limits)
        self.edge = edge or make_edge(core=CoreOfPods([]), limits=limited, forward=self._serve, gate=gate)
        self._config = uvicorn.Config(self.edge, http=EdgeProtocol, ws="none", lifespan="off", log_config=None)
        self._config.load()
        self._state = ServerState()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def _serve(self, context: RequestContext, client: Any) -> None:
        client.start(200, [(b"content-length", b"2")])
        client.put(b"o")
        await self.may_end.wait()
        client.put(b"k")
        client.finish()

    def protocol(self) -> EdgeProtocol:
        return EdgeProtocol(self._config, self._state, {}, asyncio.get_running_loop())

    def connect(self, host: str = "10.0.0.1") -> Wire:
        return Wire(self, host)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.quiet.close()
        self.other.close()

    @property
    def open(self) -> int:
        return len(self._state.connections)

    @property
    def placed(self) -> int:
        return self.edge.client_connections.used

    async def is_answered(self, data: bytes, host: str = "10.0.0.1") -> bool:
        """Whether a new connection's request is answered with 200."""
        wire = self.connect(host)
        await asyncio.sleep(HEAD_S)
        wire.send(data)
        await pause()
        wire.abort()
        return wire.status == 200


async def pause() -> None:
    """All callbacks that are ready run, and those soon after."""
    await asyncio.sleep(0.02)


def keep_open(network: Network, count: int, data: bytes, host: str = "10.0.0.1", times: int = 500) -> list[Wire]:
    """Open connections that send this, and each again when it is closed. At most `times`: else time would stand still
    for ever."""
    wires = []

    def connect() -> None:
        wires.append(network.connect(host).send(data) if data else network.connect(host))

    def again(wire: Wire) -> None:
        if wire in wires and len(wires) < times:
            asyncio.get_running_loop().call_soon(connect)

    network.on_end = again
    for _ in range(count):
        connect()
    return wires


ATTACKS = {
    "nothing": b"",
    "half a head": HEAD,
    "a head and a byte": chat("evil")[: 1 - len(CHAT)],
    "an upload without a key": UPLOAD,
}


@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("quotas", [(Quota(concurrent_requests=1),), ()], ids=["one at a time", "no quota"])
async def test_connections_of_one_tenant_refuse_no_request_of_another(data: bytes, quotas: tuple[Quota, ...]) -> None:
    """From the same address. It opens 80, and each again when it is closed."""
    with Network(gate_of(*quotas)) as network:
        keep_open(network, 80, data)
        await pause()
        for _ in range(30):
            assert await network.is_answered(chat("good"))
        assert network.open <= PLACES + PLACES // 8 + MIN_NEWCOMERS


async def test_without_keys_the_address_stands_for_the_tenant() -> None:
    with Network() as network:
        keep_open(network, 80, UPLOAD, EVIL)
        for _ in range(30):
            assert await network.is_answered(chat("good"), GOOD)
        assert network.open <= PLACES + PLACES // 8 + MIN_NEWCOMERS


async def test_whoever_needs_its_share_gets_it_from_incomplete_requests() -> None:
    """The client with more than its share loses them, the longest first. It gets an answer, and no more places."""
    with Network() as network:
        evil = []
        for _ in range(PLACES):
            evil.append(network.connect(EVIL).send(UPLOAD))
            await pause()
        network.may_end.clear()
        good = [network.connect(GOOD).send(chat("good")) for _ in range(PLACES // 2)]
        await pause()
        assert {wire.status for wire in good} == {200}
        lost = [wire.status for wire in evil]
        assert lost == sorted(lost, reverse=True) and 20 < lost.count(429) < PLACES // 2
        again = network.connect(EVIL).send(UPLOAD)
        await pause()
        assert again.status == 429 and b"retry-after:" in again.written and b"share_exceeded" in again.written
        assert not any(wire.ended for wire in good)


async def test_probes_that_never_end_keep_no_operator_out(tmp_path: Path) -> None:
    """They need no token, and come from the same address."""
    (tmp_path / "token").write_text("secret")
    token = BearerFile(str(tmp_path / "token"), "admin.bearer_file")
    with Network(edge=AdminEdge(Limits(max_connections=PLACES), own_pods(), "0.0.0.0", token)) as network:
        keep_open(network, 80, b"GET /livez HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{")
        await pause()
        for _ in range(30):
            assert await network.is_answered(
                b"GET /admin/pods HTTP/1.1\r\nhost: h\r\nauthorization: Bearer secret\r\n\r\n"
            )


async def test_no_response_that_began_is_cut() -> None:
    """The others get an eighth more than the limit, and then an answer that says so."""
    with Network() as network:
        network.may_end.clear()
        running = [network.connect(EVIL).send(chat("evil")) for _ in range(PLACES)]
        await pause()
        good = [network.connect(GOOD).send(chat("good")) for _ in range(8)]
        await pause()
        statuses = [wire.status for wire in good]
        assert statuses == sorted(statuses) and statuses.count(200) >= 4 and {*statuses} == {200, 503}
        network.may_end.set()
        await pause()
        assert all(wire.written.endswith(b"\r\n\r\nok") for wire in running)
        good[-1].send(chat("good"))
        await pause()
        assert good[-1].written.endswith(b"\r\n\r\nok")


async def test_idle_connections_of_one_within_its_share_stay() -> None:
    """Those of the client with the most end first, also if they wait for less time."""
    with Network() as network:
        good = [network.connect(GOOD).send(chat("good")) for _ in range(8)]
        await pause()
        evil = [network.connect(EVIL).send(chat("evil")) for _ in range(PLACES - 8)]
        await pause()
        keep_open(network, 80, UPLOAD, EVIL)
        others = [network.connect(f"10.0.1.{number}").send(chat("good")) for number in range(20)]
        await pause()
        assert {wire.status for wire in others} == {200}
        assert not any(wire.ended for wire in good)
        assert any(wire.ended for wire in evil)


async def test_a_request_refused_by_its_head_takes_no_place() -> None:
    """Its connection has one when a later request is admitted, until it ends."""
    with Network(gate_of()) as network:
        wire = network.connect().send(UPLOAD)
        other = network.connect().send(HEAD + b"\r\n")
        await pause()
        assert (wire.status, other.status, network.placed) == (401, 401, 0)
        other.send(chat("good"))
        assert network.placed == network.edge.client_connections.part("good") == 1
        await pause()
        other.abort()
        wire.abort()
        await pause()
        assert not network.placed and not network.open and not network.edge.newcomers.networks


async def test_a_connection_that_an_answered_client_does_not_close_loses_its_place() -> None:
    """With TLS, the router waits for the client's end. Responses that the client still reads are not cut."""
    with Network() as network:
        network.uses_tls = True
        ending = chat("evil").replace(b"content-type", b"connection: close\r\ncontent-type", 1)
        evil = [network.connect(EVIL).send(ending) for _ in range(PLACES)]
        evil[0].unread_bytes = 1
        await pause()
        good = [network.connect(GOOD).send(chat("good")) for _ in range(20)]
        await pause()
        assert {wire.status for wire in good} == {200}
        assert not evil[0].ended and sum(wire.ended for wire in evil) >= 10


async def test_a_proxys_connection_serves_another_client_also_if_all_are_in_use() -> None:
    """A place that it has only changes hands."""
    with Network() as network:
        proxied = [network.connect("127.0.0.1") for _ in range(PLACES)]
        for client in (b"10.0.0.1", b"10.0.0.2", b"10.0.0.1"):
            for wire in proxied:
                wire.written = b""
                wire.send(chat("good").replace(b"host: h", b"host: h\r\nx-forwarded-for: " + client, 1))
            await pause()
            assert {wire.status for wire in proxied} == {200}
            assert network.edge.client_connections.part(client.decode()) == network.placed == PLACES


async def test_a_new_connection_whose_head_has_arrived_is_not_dropped() -> None:
    """The event loop has not read it yet."""
    with Network() as network:
        wires = [network.connect() for _ in range(2 * PLACES)]
        network.other.send(b"a head")
        await pause()
        assert not any(wire.ended for wire in wires)
        network.quiet.recv(100)
        await pause()
        assert [wire.ended for wire in wires] == [True] * PLACES + [False] * PLACES


async def test_connections_of_many_networks_end_no_other_newcomer() -> None:
    """Only the network with the most loses some."""
    with Network() as network:
        good = network.connect(GOOD)
        keep_open(network, 200, b"", "fd00::1", times=2000)
        keep_open(network, 200, HEAD, "fd00::2", times=2000)
        await asyncio.sleep(0.2)
        assert network.open <= 400 and not good.ended
        good.send(chat("good"))
        await pause()
        assert good.status == 200


async def test_fresh_bodies_of_one_client_leave_memory_for_others() -> None:
    """However often it sends new ones: if it has more than its share, an incomplete one has no time."""
    with Network(max_held_bytes=1000) as network:
        large = HEAD + b"content-length: 101\r\n\r\n" + b"x" * 100
        evil = keep_open(network, 10, large, EVIL)
        network.may_end.clear()
        await pause()
        good = [network.connect(GOOD).send(large) for _ in range(5)]
        await pause()
        memory = network.edge.body_memory.bound
        assert memory.part(GOOD) == 500 and not any(wire.status for wire in good)
        assert [wire.status for wire in evil[:4]] == [503] * 4
