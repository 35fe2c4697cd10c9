"""Connects a client's websocket to one pod for its whole life.

The bytes of both directions pass unread, as fast as the slower side takes them. When one side closes its connection,
the rest of its bytes is sent and the other side is closed. Another pod is tried only if the first cannot be reached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qs

import httptools

from router.errors import AccessDenied, ConnectFailed, RouterError, UpstreamBroken, UpstreamTimeout
from router.frontends.http.client_deadlines import ClientDeadlines
from router.frontends.http.connection import MAX_FIELDS
from router.frontends.http.cors import CorsPolicy, is_foreign_page
from router.frontends.http.request_head import check_head
from router.frontends.http.upstream import UpstreamSender
from router.policy.plans import FORM_BYTES_PER_TOKEN
from router.request.context import RequestContext
from router.request.inbound import HeaderList, first_values
from router.request.response_reader import TokenCountingReader
from router.request.tracker import Tracker
from router.types import Pod

BUFFER_BYTES = 64 * 1024
"""Size of the buffer of each direction at each side."""
CLOSE_S = 5.0
"""How long a side may take to receive what was sent before the other side closed."""
SWITCHING = 101
_UPGRADE: HeaderList = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]


@dataclass(slots=True, eq=False)
class TunnelEnd:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        self.writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.writer.wait_closed()
        except (TimeoutError, OSError, asyncio.CancelledError):
            self.writer.transport.abort()


class WebSocketClient(TunnelEnd):
    """The client's end, which waits for the head of the response."""

    started = False
    was_slow = False

    @property
    def disconnected(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()

    def start(self, headers: HeaderList) -> None:
        """Switch to the websocket. Headers of pods contain no line breaks."""
        self.started = True
        lines = [b"HTTP/1.1 101 Switching Protocols", *map(b": ".join, headers)]
        self.writer.write(b"\r\n".join([*lines, b"", b""]))


class WebSocketTunnels:
    def __init__(self, sender: UpstreamSender) -> None:
        self._sender = sender

    async def serve(self, tracker: Tracker, client: WebSocketClient) -> None:
        """Connect the client to a pod until one of them closes. Raises `UpstreamError` or `NoReadyPod` before the
        client has its response."""
        try:
            candidate = tracker.first(time.monotonic())
            while True:
                tracker.begin(candidate, time.monotonic())
                try:
                    await self._attempt(tracker, candidate.pod, client)
                    return
                except ConnectFailed as error:
                    following = tracker.failed(error, time.monotonic())
                    if following is None:
                        raise
                    candidate = following
        finally:
            tracker.end(time.monotonic())

    async def _attempt(self, tracker: Tracker, pod: Pod, client: WebSocketClient) -> None:
        pool = self._sender.pool(pod)
        side = TunnelEnd(*await pool.stream(BUFFER_BYTES))
        try:
            headers = await self._upgraded(tracker.context, pod, side)
            now_s = time.monotonic()
            tracker.assume_first_token(now_s)
            tracker.head(pod.id, SWITCHING, headers, now_s)
            tracker.complete(now_s)  # no byte that follows is read
            client.start([*self._sender.rules.downstream(headers), *_UPGRADE, *tracker.headers()])
            await _relay(client, side, pool.timeouts.idle_s, tracker)
        finally:
            await side.close()

    async def _upgraded(self, context: RequestContext, pod: Pod, side: TunnelEnd) -> HeaderList:
        """The headers of the pod's response that begins the websocket. Raises `UpstreamError`."""
        timeout_s = self._sender.pool(pod).timeouts.first_byte_s
        side.writer.write(self._sender.upgrade_head(context.inbound, pod))
        try:
            async with asyncio.timeout(timeout_s):
                head = await side.reader.readuntil(b"\r\n\r\n")
        except TimeoutError as error:
            raise UpstreamTimeout(f"pod {pod.id} did not respond within {timeout_s:g} s", pod=pod.id) from error
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise UpstreamBroken(f"pod {pod.id}: no response to the websocket", pod=pod.id) from error
        first, *lines = head.splitlines()  # also at a lone CR or LF, which a client may take for the end of a line
        if not first.startswith(b"HTTP/1.1 101"):
            shown = first[:100].decode("latin-1")
            raise UpstreamBroken(f"pod {pod.id} answered `{shown}` instead of a websocket", pod=pod.id)
        if len(lines) > MAX_FIELDS:
            raise UpstreamBroken(f"pod {pod.id}: headers are more than the limit", pod=pod.id)
        split = [line.partition(b":") for line in lines if line]
        return [(name.strip().lower(), value.strip()) for name, _, value in split]


async def _relay(client: TunnelEnd, pod: TunnelEnd, idle_s: float, tracker: Tracker) -> None:
    """Pass bytes until one side closes, or the pod sends nothing for `idle_s`: engines ping more often. Counts what the
    client sends as audio, and the tokens that the pod sends."""
    sent_bytes, context = 0, tracker.context

    def count_sent(piece: bytes) -> None:
        nonlocal sent_bytes
        sent_bytes += len(piece)
        context.unread_tokens = sent_bytes // FORM_BYTES_PER_TOKEN

    def count_received(piece: bytes) -> None:
        tracker.received(time.monotonic())
        if isinstance(context.reader, TokenCountingReader):
            context.reader.count(piece)

    pumps = [
        asyncio.ensure_future(_pump(client.reader, pod.writer, None, count_sent)),
        asyncio.ensure_future(_pump(pod.reader, client.writer, idle_s, count_received)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle_s: float | None, count: Callable[[bytes], object]
) -> None:
    with suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(idle_s):
                piece = await reader.read(BUFFER_BYTES)
            if not piece:
                return
            count(piece)
            writer.write(piece)
            await writer.drain()


OnLost = Callable[[Exception | None], None]


class _Streams(asyncio.StreamReaderProtocol):
    """The protocol of a connection that was handed over, whose client must still read in time. `on_lost`: of the
    protocol that it had before."""

    client: WebSocketClient

    def __init__(self, reader: asyncio.StreamReader, on_lost: OnLost, deadlines: ClientDeadlines) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._on_lost = on_lost
        self._deadlines = deadlines

    def eof_received(self) -> bool:
        """Whether the client may still read: else it has left before a pod answered, and the connection is closed."""
        return bool(super().eof_received()) and self.client.started

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadlines.await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadlines.drained()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(exc)


def taken_over(
    transport: asyncio.Transport, rest: bytes, on_lost: OnLost, deadlines: ClientDeadlines
) -> WebSocketClient:
    """The client of this connection from now on. `rest`: what it has sent behind its request."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(BUFFER_BYTES, loop)
    streams = _Streams(reader, on_lost, deadlines)
    transport.set_protocol(streams)
    streams.connection_made(transport)
    if rest:
        reader.feed_data(rest)
    streams.client = WebSocketClient(reader, asyncio.StreamWriter(transport, streams, reader, loop))
    return streams.client


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
    if not is_foreign_page(named, cors):
        return None
    return AccessDenied("Websockets of web pages from another origin are refused (edge.cors_origins).")


def model_in_query(target: bytes) -> str:
    """The value of `model` in the query of a target; "" without one."""
    query = target.partition(b"?")[2].decode("latin-1")
    try:
        return parse_qs(query, max_num_fields=100).get("model", [""])[0]
    except ValueError:
        return ""
