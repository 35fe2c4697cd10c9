"""Connects a client's websocket to one pod for its whole life.

The bytes of both directions pass unread, as fast as the slower side takes them. When one side closes its connection,
the rest of its bytes is sent and the other side is closed. Another pod is tried only if the first cannot be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from router.decision import Candidate, Direct
from router.errors import ConnectFailed, NoReadyPod, UpstreamBroken, UpstreamTimeout
from router.proxy.booking import Booking
from router.proxy.dependencies import ProxyDependencies
from router.proxy.headers import HeaderList
from router.proxy.request_context import RequestContext
from router.proxy.upstream import UpstreamSender
from router.types import Pod

BUFFER_BYTES = 64 * 1024
"""Of each direction at each side."""
CLOSE_S = 5.0
"""How long a side may take to receive what was sent before the other side closed."""
SWITCHING = 101
_UPGRADE: HeaderList = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]


@dataclass(slots=True, eq=False)
class TunnelEnd:
    """One end of a tunnel."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        """Close the connection when all is sent, within `CLOSE_S`."""
        self.writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.writer.wait_closed()
        except (TimeoutError, OSError, asyncio.CancelledError):
            self.writer.transport.abort()


class WebSocketClient(TunnelEnd):
    """The client's end, which waits for the head of the response."""

    started = False

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed the connection."""
        return self.reader.at_eof() or self.writer.is_closing()

    def start(self, headers: HeaderList) -> None:
        """Switch to the websocket. Headers of pods contain no line breaks."""
        self.started = True
        lines = [b"HTTP/1.1 101 Switching Protocols", *map(b": ".join, headers)]
        self.writer.write(b"\r\n".join([*lines, b"", b""]))


class WebSocketTunnels:
    """Serves websockets."""

    def __init__(self, needs: ProxyDependencies) -> None:
        self._needs = needs
        self._rules = needs.settings.headers
        self._sender = UpstreamSender(needs.pool, self._rules)

    async def serve(self, context: RequestContext, client: WebSocketClient) -> None:
        """Connect the client to a pod until one of them closes. Raises `UpstreamError` or `NoReadyPod` before the
        client has its response."""
        failure: ConnectFailed | None = None
        for candidate in self._candidates(context):
            context.candidate, context.tries = candidate, context.tries + 1
            booking = Booking(self._needs.ledger, candidate, context.prompt_tokens, self._needs.calibrator.clock)
            try:
                await self._attempt(context, candidate, client, booking)
                return
            except ConnectFailed as error:
                failure = error
                self._needs.metrics.sent.labels(error.pod, error.code).inc()
            finally:
                booking.release()
        raise failure or NoReadyPod("No pod may serve this websocket alone.")

    def _candidates(self, context: RequestContext) -> Iterator[Candidate]:
        assert context.decision is not None
        direct = [each for each in context.decision.candidates if isinstance(each.plan, Direct)]
        return iter(direct[: 1 + self._needs.settings.retries])

    async def _attempt(
        self, context: RequestContext, candidate: Candidate, client: WebSocketClient, booking: Booking
    ) -> None:
        context.phases.enter("attempt")
        pod = candidate.plan.pod
        side = TunnelEnd(*await self._needs.pool(pod).stream(BUFFER_BYTES))
        try:
            headers = await self._upgraded(context, pod, side)
            booking.assume_first_token()
            context.phases.enter("relay")
            context.status, context.result = SWITCHING, "ok"
            self._needs.metrics.sent.labels(pod.id, "ok").inc()
            shown = [(b"x-warmroute-pod", pod.id.encode())] if self._needs.settings.route_headers else []
            request_id = (b"x-request-id", context.request.id.encode())
            client.start([*self._rules.downstream(headers), *_UPGRADE, request_id, *shown])
            await _relay(client, side, self._needs.pool(pod).timeouts.idle_s)
        finally:
            await side.close()

    async def _upgraded(self, context: RequestContext, pod: Pod, side: TunnelEnd) -> HeaderList:
        """The headers of the pod's response that begins the websocket. Raises `UpstreamError`."""
        timeout_s = self._needs.pool(pod).timeouts.first_byte_s
        side.writer.write(self._sender.upgrade_head(context.inbound, pod))
        try:
            async with asyncio.timeout(timeout_s):
                head = await side.reader.readuntil(b"\r\n\r\n")
        except TimeoutError as error:
            raise UpstreamTimeout(f"pod {pod.id} did not respond within {timeout_s:g} s", pod=pod.id) from error
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise UpstreamBroken(f"pod {pod.id}: no response to the websocket", pod=pod.id) from error
        first, *lines = head[:-4].split(b"\r\n")
        if not first.startswith(b"HTTP/1.1 101"):
            shown = first[:100].decode("latin-1")
            raise UpstreamBroken(f"pod {pod.id} answered `{shown}` instead of a websocket", pod=pod.id)
        split = [line.partition(b":") for line in lines]
        return [(name.strip().lower(), value.strip()) for name, _, value in split]


async def _relay(client: TunnelEnd, pod: TunnelEnd, idle_s: float) -> None:
    """Pass bytes until one side closes, or the pod sends nothing for `idle_s`: engines ping more often."""
    pumps = [
        asyncio.ensure_future(_pump(client.reader, pod.writer, None)),
        asyncio.ensure_future(_pump(pod.reader, client.writer, idle_s)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle_s: float | None) -> None:
    with suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(idle_s):
                piece = await reader.read(BUFFER_BYTES)
            if not piece:
                return
            writer.write(piece)
            await writer.drain()
