"""Hands a client's connection from the HTTP parser over to a websocket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs

import httptools

from router.errors import AccessDenied, RouterError
from router.frontends.http.cors import CorsPolicy
from router.frontends.http.request_head import check_head
from router.frontends.http.websockets import BUFFER_BYTES, WebSocketClient
from router.request.inbound import HeaderList, first_values

OnLost = Callable[[Exception | None], None]


class _Streams(asyncio.StreamReaderProtocol):
    """The protocol of a connection that was handed over. `on_lost`: of the protocol that it had before."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop, on_lost: OnLost) -> None:
        super().__init__(reader, loop=loop)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(exc)


def taken_over(transport: asyncio.Transport, rest: bytes, on_lost: OnLost) -> WebSocketClient:
    """The client of this connection from now on. `rest`: what it has sent behind its request."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(BUFFER_BYTES, loop)
    streams = _Streams(reader, loop, on_lost)
    transport.set_protocol(streams)
    streams.connection_made(transport)
    if rest:
        reader.feed_data(rest)
    return WebSocketClient(reader, asyncio.StreamWriter(transport, streams, reader, loop))


def asks_for_websocket(parser: httptools.HttpRequestParser, headers: HeaderList) -> bool:
    """Whether the head that was just parsed begins a websocket (RFC 6455, 4.1)."""
    is_get = parser.get_method() == b"GET" and parser.get_http_version() == "1.1"
    return is_get and first_values(headers).get(b"upgrade", b"").lower() == b"websocket"


def websocket_refusal(headers: HeaderList, named: Mapping[bytes, bytes], cors: CorsPolicy | None) -> RouterError | None:
    """Why a websocket is refused. A web page of another origin that is not allowed is, because browsers do not ask for
    permission first."""
    try:
        check_head("1.1", headers, named)
    except RouterError as error:
        return error
    origin = named.get(b"origin")
    if not origin or origin.partition(b"://")[2] == named.get(b"host") or (cors and cors.headers_for(origin)):
        return None
    return AccessDenied("Websockets of web pages from another origin are refused (edge.cors_origins).")


def model_in_query(target: bytes) -> str:
    """The value of `model` in the query of a target; "" without one."""
    query = target.partition(b"?")[2].decode("latin-1")
    try:
        return parse_qs(query, max_num_fields=100).get("model", [""])[0]
    except ValueError:
        return ""
