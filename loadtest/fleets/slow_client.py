"""A client with a slow connection.

It opens its own connection with a small receive window, reads a few hundred bytes at a time and pauses after each
piece, so that the rest of the response waits in the router.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

import httptools

from router.addresses import split_url
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from router.frontends.http.upstream import UpstreamPool
from router.request.inbound import IncomingResponse

WINDOW_BYTES = 2048
"""Receive buffer size; the kernel doubles it."""
PIECE_BYTES = 512
READ_TIMEOUT_S = 120.0


async def exchange_at_pace(pool: UpstreamPool, message: bytes, read_pause_s: float) -> IncomingResponse:
    """Send a request with a slow client if its session pauses, else with the pool. For `load_driver.drive`."""
    return await (slow_exchange(pool.pod, message, read_pause_s) if read_pause_s else pool.exchange(message))


async def slow_exchange(url: str, message: bytes, pause_s: float) -> SlowResponse:
    """Send a complete request to the server at `url` and wait for the response head.

    Raises `ConnectFailed`, `UpstreamBroken` or `UpstreamTimeout`.
    """
    parts = split_url(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    try:
        small = await _small_window(parts.hostname or "", port)
        reader, writer = await asyncio.open_connection(
            sock=small, limit=PIECE_BYTES, ssl=tls, server_hostname=parts.hostname if tls else None
        )
    except OSError as error:
        raise ConnectFailed(f"{url}: {error}") from error
    answer = SlowResponse(reader, writer, pause_s)
    try:
        writer.write(message)
        await answer.head()
    except BaseException:
        answer.close()
        raise
    return answer


async def _small_window(host: str, port: int) -> socket.socket:
    """A connected socket with a small receive window, which must be set before connecting."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    small = socket.socket(family, kind, protocol)
    try:
        small.setblocking(False)
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        await loop.sock_connect(small, address)
    except BaseException:
        small.close()
        raise
    return small


class SlowResponse:
    """A response being read slowly. Always `close()` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._pause_s = pause_s
        self._parser = httptools.HttpResponseParser(self)
        self._head_done = False
        self._complete = False
        self._started = False
        self._body = b""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self._head_done:
            await self._take()

    async def read(self) -> bytes:
        """The next part of the body, after a pause; b"" at the end.

        Raises `UpstreamBroken` or `UpstreamTimeout`.
        """
        if self._started:
            await asyncio.sleep(self._pause_s)
        self._started = True
        while not self._body and not self._complete:
            await self._take()
        piece, self._body = self._body, b""
        return piece

    def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()

    async def _take(self) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                data = await self._reader.read(PIECE_BYTES)
            if not data:
                raise UpstreamBroken("the connection was closed inside the response")
            self._parser.feed_data(data)
        except TimeoutError:
            raise UpstreamTimeout(f"no data for {READ_TIMEOUT_S:g} s") from None
        except (OSError, httptools.HttpParserError) as error:
            raise UpstreamBroken(f"the response broke off: {error}") from error

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete = True
