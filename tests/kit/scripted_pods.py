"""Scripted pods and a forwarder in front of them: in memory and virtual time, or in a test marked `net` on sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.admission.tenant import OPEN_TENANT
from router.config.schema import Limits
from router.frontends.http.upstream import UpstreamPools
from router.frontends.response_locator import ResponseLocator
from router.observe.ended import RecordedDecision
from router.request.context import RequestContext
from router.request.inbound import HeaderList
from router.types import InferenceRequest, PromptPrefix
from router.wiring.router import build_forwarder
from tests.kit.cores import CoreOfPods, pods_at
from tests.kit.deadlines import DEADLINE_S
from tests.kit.step_loop import StepLoop

POLL_S = 0.001
LONGER_S = 10 * DEADLINE_S
"""Timeouts of the router that no test may reach."""

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


class Asked:
    """One request as a pod received it, and methods to respond."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        self._reader, self._writer = reader, writer
        self.raw = body
        lines = head.decode().split("\r\n")
        self.target = lines[0].split(" ")[1]
        self.headers = dict(line.split(": ", 1) for line in lines[1:] if line)

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found

    async def answer(self, body: Mapping[str, Any], status: int = 200) -> None:
        """Send a whole response."""
        raw = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {JSON}\r\ncontent-length: {len(raw)}\r\n\r\n"
        await self.send(head.encode() + raw)

    async def begin(self) -> None:
        """The head of an event stream."""
        await self.send(f"HTTP/1.1 200 OK\r\ncontent-type: {EVENTS}\r\ntransfer-encoding: chunked\r\n\r\n".encode())

    async def event(self, body: Mapping[str, Any] | str) -> None:
        """One event."""
        raw = b"data: " + (body if isinstance(body, str) else json.dumps(body)).encode() + b"\n\n"
        await self.send(b"%x\r\n%b\r\n" % (len(raw), raw))

    async def end(self) -> None:
        """The last chunk."""
        await self.send(b"0\r\n\r\n")

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    def reset(self) -> None:
        """Die."""
        if (connection := self._writer.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def hang_up(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def hung_up(self) -> None:
        """Wait until the router closes the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


Behaviour = Callable[[Asked], Awaitable[None]]


class ScriptedPod:
    """Serves every request by `behaviour`, which may be changed at any time."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: list[Asked] = []
        self.connected = 0
        self.working = 0
        """Requests whose behaviour is still running."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                asked = Asked(reader, writer, head, await reader.readexactly(length))
                self.asked.append(asked)
                await self._serve(asked)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connected -= 1
            writer.close()

    async def _serve(self, asked: Asked) -> None:
        self.working += 1
        try:
            await self.behaviour(asked)
        finally:
            self.working -= 1


@dataclass
class Client:
    """A downstream that records what it receives."""

    started: bool = False
    disconnected: bool = False
    was_slow: bool = False
    finished: bool = False
    status: int = 0
    headers: HeaderList = field(default_factory=list)
    body: bytes = b""
    wrote: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, status: int, headers: HeaderList) -> None:
        self.started, self.status, self.headers = True, status, headers

    def put(self, piece: bytes) -> bool:
        self.body += piece
        self.wrote.set()
        return True

    async def ready(self) -> None:
        pass

    def finish(self) -> None:
        self.finished = True

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")


class Town(CoreOfPods):
    """A fleet of scripted pods by id, and the forwarder under test."""

    def __init__(
        self,
        pods: Mapping[str, ScriptedPod],
        urls: Mapping[str, str],
        first_byte_s: float,
        retries: int,
        trusts_uuids: bool = False,
    ):
        super().__init__(pods_at(urls), retries=retries, trusts_uuids=trusts_uuids)
        self.made = pods
        self.pools = UpstreamPools(
            Limits(connect_timeout_s=LONGER_S, first_byte_timeout_s=first_byte_s, idle_timeout_s=LONGER_S)
        )
        self.read_prompt: PromptPrefix | None = None
        """The result of `read` for every prompt."""
        self.responses = ResponseLocator(self.fleet, self.state.stored)
        self.forwarder = build_forwarder(
            self.core, self.pools, self.config.edge, self.metrics, {"m": self}, self.responses
        )

    async def read(self, request: InferenceRequest) -> PromptPrefix | None:
        """The reader of all prompts."""
        return self.read_prompt

    async def forward(self, context: RequestContext, client: Client | None = None) -> Client:
        """Serve a request through all phases, under a deadline."""
        client = client or Client()
        async with asyncio.timeout(DEADLINE_S):
            await self.forwarder.forward(context, client)
        return client

    async def serve(self, context: RequestContext, client: Client | None = None) -> Client:
        """Attempt in order, under a deadline."""
        client = client or Client()
        async with asyncio.timeout(DEADLINE_S):
            await self.core.attempts(self.core.tracker(context), client, self.forwarder)
        return client

    async def preview(self, request: InferenceRequest) -> RecordedDecision:
        """The decision that would be made about a request."""
        return await self.core.preview(self.forwarder, lambda _name: OPEN_TENANT, request, [])

    def handoffs(self, result: str, dialect: str = "nixl") -> float:
        return self.counted("warmroute_handoffs_total", dialect=dialect, result=result)

    async def until(self, holds: Callable[[], object]) -> None:
        """Run other tasks until a condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(POLL_S)

    async def returned(self) -> None:
        """Wait until all KV that nobody reads has been given back."""
        await self.forwarder.splits.returns.drained()

    async def left_alone(self) -> None:
        """Wait until no pod works for the router and no lease is left."""
        await self.returned()
        await self.until(lambda: not any(pod.working for pod in self.made.values()))
        await self.until(lambda: not self.ledger.inflight())


@asynccontextmanager
async def town(
    *,
    host: str = "127.0.0.1",
    first_byte_s: float = LONGER_S,
    retries: int = 2,
    trusts_uuids: bool = False,
    **behaviours: Behaviour,
) -> AsyncIterator[Town]:
    """Run pods, by id."""
    pods = {name: ScriptedPod(behaviour) for name, behaviour in behaviours.items()}
    async with _reachable(pods, host) as urls:
        made = Town(pods, urls, first_byte_s, retries, trusts_uuids)
        try:
            yield made
        finally:
            await made.returned()
            made.pools.close()


@asynccontextmanager
async def _reachable(pods: Mapping[str, ScriptedPod], host: str) -> AsyncIterator[Mapping[str, str]]:
    """The URLs of the pods, in memory where the event loop connects to them."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, StepLoop):
        loop.pods = dict(pods)
        yield {name: f"http://{name}" for name in pods}
        return
    servers = {name: await asyncio.start_server(pod, host, 0) for name, pod in pods.items()}
    bracketed = f"[{host}]" if ":" in host else host
    try:
        yield {name: f"http://{bracketed}:{server.sockets[0].getsockname()[1]}" for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.close()
            await server.wait_closed()
