"""Fuzzes client connections: the router and a pod must read the same requests.

Any bytes of a connection: each accepted request is exactly one request for h11, a parser that shares no code with ours,
and no field of it steers an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from router.admission.gate import AdmissionGate
from router.api.app import App
from router.api.exchange import Exchange
from router.api.openai_edge import OpenAiEdge
from router.api.protocol import EdgeProtocol
from router.config.schema import Edge, Limits
from router.engines.forwarded_headers import HOP_BY_HOP
from router.engines.steering import STEERING_FIELDS, STEERING_HEADERS
from router.errors import RouterError
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.proxy.headers import HeaderRules
from router.proxy.relay import Downstream
from router.proxy.request_context import RequestContext
from router.proxy.upstream import Reply, UpstreamPool, UpstreamSender
from router.types import Pod, PodSpeed
from tests.fuzz.bodies import fields_for_engines
from tests.fuzz.pieces import in_pieces
from tests.fuzz.wire import Wire

LIMITS = Limits(max_body_bytes=2000, max_header_bytes=4096)
POD = Pod(id="pod", url="http://pod:8000/base", engine="vllm", speed=PodSpeed(1, 1, 0), models=("m",), dp_rank=3)
METRICS = Metrics()
TURNS = 100
"""Rounds of the event loop, after which a pending task counts as hanging."""


class ToPod:
    """Replaces a connection pool; the pod never answers."""

    host_header, path_prefix = b"pod:8000", b"/base"

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def exchange(self, message: bytes) -> Reply:
        self.messages.append(message)
        return cast(Reply, None)


class Forwarder:
    """Sends every request to the one pod and never answers."""

    def __init__(self, pool: ToPod) -> None:
        self._sender = UpstreamSender(lambda pod: cast(UpstreamPool, pool), HeaderRules())
        self.forwarded: list[RequestContext] = []

    async def forward(self, context: RequestContext, client: Downstream) -> None:
        await self._sender.send(context.inbound, POD, context.request.body)
        self.forwarded.append(context)
        client.start(200, [(b"content-length", b"0")])
        client.put(b"")
        client.finish()


class Watched(OpenAiEdge):
    """Records unexpected errors, for which clients receive a 500."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.surprises: list[Exception] = []

    def _fail(self, client: Exchange, error: Exception, request_id: str) -> None:
        if not isinstance(error, RouterError):
            self.surprises.append(error)
        super()._fail(client, error, request_id)


async def _own(_scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """Paths outside /v1."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def _fleet() -> Fleet:
    fleet = Fleet()
    fleet.sync([POD])
    return fleet


FLEET = _fleet()
POOL = ToPod


async def _connection(pieces: list[bytes]) -> tuple[list[RequestContext], list[bytes]]:
    """The requests that reach the pod, as values and as bytes, from a client that sends these pieces and
    disconnects."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    pool, wire = ToPod(), Wire()
    forwarder = Forwarder(pool)
    edge = Watched(cast(Any, forwarder), FLEET, METRICS, Edge(), LIMITS, frozenset())
    config = uvicorn.Config(
        App(edge, cast(FastAPI, _own), AdmissionGate()),
        http=EdgeProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    config.load()
    protocol = EdgeProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    for piece in pieces:
        await _until(lambda: wire.reads or not wire.open)
        if not wire.open:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    await _until(lambda: not protocol.tasks)
    wire.open = False
    protocol.connection_lost(None)
    await _until(lambda: not protocol.tasks)
    assert edge.body_memory.bytes == 0, "bodies of requests that are over are held"
    assert not problems and not edge.surprises, (problems, edge.surprises)
    return forwarder.forwarded, pool.messages


async def _until(over: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        if over():
            return
        await asyncio.sleep(0)
    raise AssertionError("something waits for ever")


def requests(data: bytes) -> None:
    """Bytes of a client's connection."""
    whole = asyncio.run(_connection([data]))
    for context, message in zip(*whole, strict=True):
        _check_one_request(context, message)
    for pieces in in_pieces(data):
        cut = asyncio.run(_connection(pieces))
        assert [_values(each) for each in cut[0]] == [_values(each) for each in whole[0]], "pieces differ"


def _values(context: RequestContext) -> tuple[object, ...]:
    return context.inbound.method, context.inbound.target, context.inbound.headers, context.request.body


def _check_one_request(context: RequestContext, message: bytes) -> None:
    """Compare with h11, which may also refuse the message."""
    try:
        head, body, rest = _by_h11(message)
    except h11.RemoteProtocolError:
        return
    assert not rest, "a second request"
    assert (head.method, head.target) == (context.inbound.method.encode(), POOL.path_prefix + context.inbound.target)
    assert body == context.request.body
    names = [name for name, _ in head.headers]
    assert not HOP_BY_HOP & {*names}
    assert names.count(b"host") == 1 and names.count(b"content-length") <= 1
    assert not STEERING_HEADERS & {*names} - {b"x-data-parallel-rank"}
    assert [value for name, value in head.headers if name == b"x-data-parallel-rank"] == [b"3"]
    assert not STEERING_FIELDS & fields_for_engines(body).keys(), "an engine is steered"


def _by_h11(message: bytes) -> tuple[h11.Request, bytes, bytes]:
    """(head, body, remaining bytes) of a request. Raises `h11.RemoteProtocolError`."""
    pod = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    pod.receive_data(message)
    head, body = pod.next_event(), b""
    assert isinstance(head, h11.Request), "no whole head"
    while isinstance(event := pod.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage), "the body is not whole"
    return head, body, pod.trailing_data[0]


_CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "rid": "x"}'
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
_BOM = b'\xef\xbb\xbf{"model": "m", "rid": "x"}'
_WIDE = '{"model": "m", "rid": "x"}'.encode("utf-16")
SEEDS = (
    b"POST /v1/responses HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (len(_BOM), _BOM),
    b"POST /v1/responses HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (len(_WIDE), _WIDE),
    _HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_CHAT), _CHAT),
    _HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\n%b\r\n" % _CHAT[:5]
    + b"%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(_CHAT) - 5, _CHAT[5:]),
    b"POST /v1/responses?a=%20b HTTP/1.1\r\nhost: h\r\nX-Data-Parallel-Rank: 7\r\nConnection: close, x-mine\r\n"
    b'x-mine: 1\r\ncontent-length: 38\r\n\r\n{"model": "m", "bootstrap_host": "h"}  ',
    b"GET /livez HTTP/1.1\r\nhost: h\r\n\r\nGET /v1/files HTTP/1.1\r\nhost: h\r\n\r\n"
    + _HEAD
    + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/score HTTP/1.0\r\ncontent-length: 0\r\nx-forwarded-for: 10.0.0.1\r\n\r\n",
    b"POST http://h:1/score#y HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
)
WORDS = (
    *(b"\r\n%b: " % name for name in sorted(HOP_BY_HOP | STEERING_HEADERS | {b"host", b"content-length", b"expect"})),
    *(b"\r\n\r\n", b"\r\n", b"chunked", b"close", b"keep-alive", b"100-continue", b" HTTP/1.0", b" HTTP/1.1", b"\r\n "),
    *(
        b"GET /v1/score",
        b"POST /v1/score",
        b"CONNECT ",
        b"http://h/",
        b"*",
        b"%2f",
        b"%0d%0a",
        b"?",
        b"#",
        b"0\r\n\r\n",
        b"\xff",
    ),
)
