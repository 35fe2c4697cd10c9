"""Fuzzes client connections: the client's bytes, the router and a pod must have the same requests.

Any bytes of a connection: each accepted request is one that h11 reads in these bytes, with the headers of its head and
its own body. It is exactly one request for the pod, and no field of it steers an engine.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from time import thread_time
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from router.admission.gate import AdmissionGate
from router.config.schema import Edge, Limits
from router.engines.forwarded_headers import HOP_BY_HOP
from router.engines.steering import STEERING_FIELDS, STEERING_HEADERS
from router.errors import MalformedRequest, RouterError
from router.frontends.http.headers import HeaderRules
from router.frontends.http.http_edge import AnyExchange
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.http.protocol import EdgeProtocol
from router.frontends.http.upstream import Reply, UpstreamPool, UpstreamSender
from router.frontends.response_locator import ResponseLocator
from router.request.context import RequestContext
from router.request.effects import Downstream
from router.request.inbound import HeaderList
from router.request.parse import without_engine_fields
from router.request.reading import RequestReader
from tests.bench.pace import slowness
from tests.fuzz.bodies import fields_for_engines
from tests.fuzz.by_h11 import ReadRequest, read_connection
from tests.fuzz.pieces import in_pieces
from tests.fuzz.wire import Wire
from tests.kit.cores import CoreOfPods
from tests.kit.scenes import make_pod

LIMITS = Limits(max_body_bytes=2000, max_header_bytes=4096)
POD = make_pod("pod", url="http://pod:8000/base", models=("m",), dp_rank=3)
TURNS = 100
"""Rounds of the event loop, after which a pending task counts as hanging."""
MOST_LOOP_S = 0.02 if "atheris" in sys.modules else math.inf
"""CPU time that parsing a piece may take on the reference machine: other clients wait meanwhile."""
ADDED_FIELDS = ("model", "stream_options")
ADDED = {
    *(b"host", b"content-length", b"x-request-id", b"x-forwarded-for", b"x-data-parallel-rank"),
    b"accept-encoding",
}
"""Headers that the router adds."""


class ToPod:
    """Replaces a connection pool; the pod never answers."""

    host_header, path_prefix, has_key = b"pod:8000", b"/base", False
    rank_headers = ((b"x-data-parallel-rank", b"3"),)

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
        await self._sender.send(context.head, POD, context.request.body)
        self.forwarded.append(context)
        client.start(200, [(b"content-length", b"0")])
        client.put(b"")
        client.finish()


class Watched(OpenAiEdge):
    """Records unexpected errors, for which clients receive a 500."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.surprises: list[Exception] = []

    def _answer(self, client: AnyExchange, error: Exception) -> None:
        if not isinstance(error, RouterError):
            self.surprises.append(error)
        super()._answer(client, error)


class Own:
    """The application, for the other paths. /livez responds without reading its body."""

    def __init__(self) -> None:
        self.received: list[ReadRequest] = []
        self.reading = 0
        """Requests whose body is incomplete."""

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
        if scope["path"] != "/livez":
            self.reading += 1
            body = await _body(receive)
            self.reading -= 1
            if body is None:
                return
            self.received.append(ReadRequest(scope["method"].encode(), scope["raw_path"], scope["headers"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def _body(receive: Callable[[], Awaitable[Any]]) -> bytes | None:
    """The whole body; None where the client disconnects."""
    pieces: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message["body"])
        if not message["more_body"]:
            return b"".join(pieces)
    return None


POOL, CORE = ToPod, CoreOfPods([POD])
READER = RequestReader(CORE.fleet, Edge(), LIMITS.max_messages, frozenset())
RESPONSES = ResponseLocator(CORE.fleet, CORE.state.stored)


class Accepted:
    """The requests of one connection that reach the pod, as values and as bytes, and the application."""

    def __init__(self) -> None:
        self.pool, self.own = ToPod(), Own()
        self.forwarder = Forwarder(self.pool)
        self.slowest_piece_s = 0.0


async def _connection(pieces: list[bytes]) -> Accepted:
    """What is accepted from a client that sends these pieces and disconnects."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    accepted, wire = Accepted(), Wire()
    own = cast(FastAPI, accepted.own)
    edge = Watched(own, AdmissionGate(), accepted.forwarder, CORE.core.endings, READER, RESPONSES, Edge(), LIMITS)
    edge.own_bodies = True
    config = uvicorn.Config(
        edge,
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
        began_s = thread_time()
        protocol.data_received(piece)
        accepted.slowest_piece_s = max(accepted.slowest_piece_s, thread_time() - began_s)
        await asyncio.sleep(0)
    await _until(lambda: len(protocol.tasks) == accepted.own.reading)
    wire.open = False
    protocol.connection_lost(None)
    await _until(lambda: not protocol.tasks)
    assert edge.body_memory.bytes == 0, "bodies of requests that are over are held"
    assert not problems and not edge.surprises, (problems, edge.surprises)
    return accepted


async def _until(over: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        if over():
            return
        await asyncio.sleep(0)
    raise AssertionError("something waits for ever")


def requests(data: bytes) -> None:
    """Bytes of a client's connection."""
    whole = asyncio.run(_connection([data]))
    forwarded = whole.forwarder.forwarded
    for context, message in zip(forwarded, whole.pool.messages, strict=True):
        _check_one_request(context, message)
    _check_against_client(data, map(_as_read, forwarded))
    _check_against_client(data, whole.own.received)
    for pieces in in_pieces(data):
        cut = asyncio.run(_connection(pieces))
        assert list(map(_values, cut.forwarder.forwarded)) == list(map(_values, forwarded)), "pieces differ"
        assert cut.own.received == whole.own.received, "pieces differ for the application"
    if whole.slowest_piece_s > MOST_LOOP_S:  # a pause of the garbage collector is not repeated
        again_s = [asyncio.run(_connection([data])).slowest_piece_s / slowness() for _ in range(3)]
        assert min(again_s) <= MOST_LOOP_S, f"the event loop is blocked for {min(again_s)} s"


def _as_read(context: RequestContext) -> ReadRequest:
    head = context.head
    return ReadRequest(head.method.encode(), head.target, head.headers, context.request.body)


def _check_against_client(data: bytes, accepted: Iterable[ReadRequest]) -> None:
    """Each accepted request is one that the client sent, in the same order. h11 refuses some bytes that the router
    accepts; what follows those is not compared."""
    sent = read_connection(data.lstrip(b"\r\n"))
    remaining = iter(sent.requests)
    for request in accepted:
        is_known = any(_is_same(request, candidate) for candidate in remaining)
        assert is_known or not sent.is_valid, (request, sent)


def _is_same(accepted: ReadRequest, sent: ReadRequest) -> bool:
    """`Upgrade` is ignored, fields for engines and a byte order mark are removed, the only model is written into a body
    and usage is asked for, and the application gets HEAD as GET; h11 writes `chunked` in lower case."""
    plain = sent.body.removeprefix(BOM_UTF8)
    bodies = [sent.body, plain]
    with suppress(MalformedRequest):
        bodies.append(without_engine_fields(plain))
    return (
        accepted.method == (b"GET" if sent.method == b"HEAD" else sent.method)
        and (accepted.body in bodies or _without_added(accepted.body) in map(_without_added, bodies))
        and _comparable(accepted.headers) == _comparable(sent.headers)
    )


def _without_added(body: bytes) -> object:
    """The fields of a JSON object that the router does not add; any other body as it is."""
    try:
        fields = json.loads(body)
    except ValueError:
        return body
    if not isinstance(fields, dict):
        return body
    return {key: value for key, value in fields.items() if key not in ADDED_FIELDS}


def _values(context: RequestContext) -> tuple[object, ...]:
    return context.head.method, context.head.target, context.head.headers, context.request.body


def _comparable(headers: HeaderList) -> HeaderList:
    return [(name, value.strip()) for name, value in headers if name not in (b"transfer-encoding", b"upgrade")]


def _check_one_request(context: RequestContext, message: bytes) -> None:
    """Compare with h11, which may also refuse the message."""
    at_pod = read_connection(message)
    if not at_pod.is_valid:
        return
    assert len(at_pod.requests) == 1 and not at_pod.rest, "not exactly one request"
    ((method, target, headers, body),) = at_pod.requests
    assert (method, target) == (context.head.method.encode(), POOL.path_prefix + context.head.target)
    assert body == context.request.body
    names = [name for name, _ in headers]
    assert not HOP_BY_HOP & {*names}
    assert {*names} <= {name for name, _ in context.head.headers} | ADDED
    assert names.count(b"host") == 1 and names.count(b"content-length") <= 1
    assert not STEERING_HEADERS & {*names} - {b"x-data-parallel-rank"}
    assert [value for name, value in headers if name == b"x-data-parallel-rank"] == [b"3"]
    assert not STEERING_FIELDS & fields_for_engines(body).keys(), "an engine is steered"


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
    _HEAD
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 54\r\n\r\n"
    + b"POST /admin/pods HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n",
    b"POST /own HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\nauthorization: x\r\nhost: h\r\n\r\n"
    b"POST /v1/score HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}",
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
        b"connection: upgrade\r\nupgrade: h2c\r\n",
        b"transfer-encoding: chunked\r\n\r\n",
        b"\r\n0\r\nx-trailer: 1\r\n\r\n",
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
