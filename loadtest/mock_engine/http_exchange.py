"""One HTTP request and its response over ASGI, with access to the connection.

Faults need two operations that ASGI lacks: closing the connection inside a response, and resetting it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_TRANSPORT = "warmroute.transport"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class EngineProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the transport in the ASGI scope.

    Only for trusted clients: httptools stops parsing at `Upgrade` and treats the rest of the body as another request.
    The router never forwards `Upgrade`. A connection that was accepted just before the engine stopped listening is
    reset."""

    def __init__(self, config: uvicorn.Config, state: ServerState, is_listening: Callable[[], bool]) -> None:
        super().__init__(config, state, {})
        self._is_listening = is_listening

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._is_listening():
            transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_TRANSPORT: {"transport": self.transport}}


class HttpExchange:
    def __init__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._transport: asyncio.Transport = scope["extensions"][_TRANSPORT]["transport"]
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> str | None:
        """First value of the header `name`, which is in lower case."""
        return next((value.decode("latin-1") for key, value in self._headers if key == name), None)

    async def body(self) -> bytes:
        """The request body; incomplete if the client disconnected."""
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def respond(self, status: int, body: bytes = b"", content_type: bytes = JSON) -> None:
        await self.begin(status, content_type, len(body))
        await self.write(body, more=False)

    async def begin(self, status: int, content_type: bytes, length_bytes: int | None = None) -> None:
        """Send status and headers; chunked without `length_bytes`."""
        headers = [(b"content-type", content_type)]
        if length_bytes is not None:
            headers.append((b"content-length", b"%d" % length_bytes))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def disconnected(self) -> None:
        """Wait until the connection is closed or the response is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def pause(self, for_s: float) -> None:
        """Sleep for `for_s`, or until the connection is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await self.disconnected()

    @contextmanager
    def cancelled_on_disconnect(self) -> Iterator[None]:
        """Cancel the current task if the connection is closed inside the block."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.get_running_loop().create_task(self.disconnected())
        watch.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
        try:
            yield
        finally:
            watch.cancel()

    async def write_raw(self, raw: bytes, piece_bytes: int) -> None:
        for at in range(0, len(raw), piece_bytes):
            self._transport.write(raw[at : at + piece_bytes])
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._transport.close()
        await self.disconnected()

    async def reset(self) -> None:
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()
        await self.disconnected()
