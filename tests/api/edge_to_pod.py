"""A client's connection through `EdgeProtocol` to a recording pod, over real sockets.

The pod parses with h11, which shares no code with the router's parser.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import uvicorn
from fastapi import FastAPI, Request
from uvicorn.server import ServerState

from router.admission.tenant import Tenant
from router.config.schema import Edge, Limits
from router.frontends.http.exchange import Exchange
from router.frontends.http.headers import HeaderRules
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.http.protocol import EdgeProtocol
from router.frontends.http.relay import read_all
from router.frontends.http.upstream import UpstreamPools, UpstreamSender
from router.request.context import RequestContext
from router.request.inbound import HeaderList
from router.request.reading import RequestReader
from router.types import Endpoint, InferenceRequest, Pod
from tests.api.edges import edge_of
from tests.kit import scenes
from tests.kit.cores import CoreOfPods
from tests.kit.deadlines import DEADLINE_S, GENEROUS
from tests.kit.scenes import make_pod

ADDED_BY_THE_ROUTER = {b"host", b"content-length", b"x-request-id", b"x-forwarded-for", b"accept-encoding"}


@dataclass(frozen=True)
class AtPod:
    """A request as the pod read it, without the headers that the router adds."""

    body: bytes = b""
    headers: HeaderList = field(default_factory=list)
    target: bytes = b"/v1/x"
    method: bytes = b"POST"


class RecordingPod:
    """Answers every request with `answer`, and records it."""

    def __init__(self) -> None:
        self.requests: list[AtPod] = []
        self.records_all = False
        """Whether it also records the headers that the router adds."""
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. h11 raises, and the connection ends, where it reads something else than requests."""
        parser = h11.Connection(h11.SERVER)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    if not (data := await reader.read(65536)):
                        return
                    parser.receive_data(data)
                elif isinstance(event, h11.Request):
                    head, body = event, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    self._record(head, body)
                    writer.write(self.answer)
                    parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    parser.send(h11.EndOfMessage())
                    parser.start_next_cycle()

    def _record(self, head: h11.Request, body: bytes) -> None:
        headers = [(bytes(name), bytes(value)) for name, value in head.headers]
        names = [name for name, _ in headers]
        assert {name: names.count(name) for name in ADDED_BY_THE_ROUTER} == dict.fromkeys(ADDED_BY_THE_ROUTER, 1)
        others = [header for header in headers if self.records_all or header[0] not in ADDED_BY_THE_ROUTER]
        self.requests.append(AtPod(body, others, bytes(head.target), bytes(head.method)))


class Forwarder:
    """Sends every request to one pod."""

    def __init__(self, pod: Pod, pools: UpstreamPools) -> None:
        self._pod, self._sender = pod, UpstreamSender(pools.of, HeaderRules())

    async def forward(self, context: RequestContext, client: Exchange) -> None:
        reply = await self._sender.send(context.head, self._pod, context.request.body)
        body = await read_all(reply)
        client.start(reply.status, HeaderRules().downstream(reply.headers))
        client.put(body)
        client.finish()


class UnreadBodies(RequestReader):
    """Reads no body."""

    def read(
        self,
        endpoint: Endpoint,
        named: Mapping[bytes, bytes],
        body: bytes,
        request_id: str,
        tenant: Tenant,
        given_model: str = "",
        *,
        stored_model: str = "",
        sees_response: bool = True,
    ) -> InferenceRequest:
        return scenes.request(request_id, endpoint=Endpoint.OTHER, body=body)


@dataclass
class Chain:
    """A client's connection to a router with one pod; `own` are the requests that reach the application."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pod: RecordingPod
    own: list[AtPod]
    edge: OpenAiEdge

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of the next response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head, await self.reader.readexactly(length)


@asynccontextmanager
async def chain(edge: Edge | None = None, *, reads_bodies: bool = False) -> AsyncIterator[Chain]:
    pod, own, loop = RecordingPod(), list[AtPod](), asyncio.get_running_loop()
    application = FastAPI(openapi_url=None)

    @application.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
    async def record(request: Request) -> str:
        headers = [header for header in request.headers.raw if header[0] not in ADDED_BY_THE_ROUTER]
        own.append(AtPod(await request.body(), headers, request.scope["raw_path"], request.method.encode()))
        return "own"

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(pod.serve, "127.0.0.1", 0) as upstream:
        url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
        served = make_pod(url=url, models=("m",))
        pools = UpstreamPools(GENEROUS)
        forwarding = (edge or Edge()).model_copy(update={"extra_paths": ("/v1/x", "/v1/next")})
        limits = Limits(max_header_bytes=4096)
        core = CoreOfPods([served])
        reader_of_heads = (RequestReader if reads_bodies else UnreadBodies)(
            core.fleet, forwarding, limits.max_messages, frozenset()
        )
        edge_to_pod = edge_of(
            core, Forwarder(served, pools), edge=forwarding, limits=limits, reader=reader_of_heads, own=application
        )
        edge_to_pod.own_bodies = True
        config = uvicorn.Config(
            edge_to_pod, http=EdgeProtocol, ws="none", lifespan="off", log_config=None, access_log=False
        )
        config.load()
        state = ServerState()
        server = await loop.create_server(lambda: EdgeProtocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield Chain(reader, writer, pod, own, edge_to_pod)
        finally:
            writer.close()
            server.close()
            pools.close()
            while state.connections:  # its end of the connection closes later, and must not outlive the loop
                await asyncio.sleep(0)
