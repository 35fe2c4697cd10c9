"""How is one HTTP exchange read, answered and broken off?

A thin face over ASGI, plus the two things ASGI has no word for and a fault needs: closing the connection in mid-answer,
and resetting it. This file never knows what is said.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TRANSPORT = "warmroute.transport"
_Made = TypeVar("_Made")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The connection closed before there was anything to say."""


class EngineProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which lets the application reach its transport."""

    def on_message_begin(self) -> None:
        """A request begins: its scope learns the transport."""
        super().on_message_begin()
        self.scope["extensions"] = {_TRANSPORT: {"transport": self.transport}}


class HttpExchange:
    """One request and its answer."""

    def __init__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._transport: asyncio.Transport = scope["extensions"][_TRANSPORT]["transport"]
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> str | None:
        """The first value of a header, given in lower case."""
        return next((value.decode("latin-1") for key, value in self._headers if key == name), None)

    async def body(self) -> bytes:
        """The whole request body; what had come of it if the client left."""
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def answer(self, status: int, body: bytes = b"", content_type: bytes = JSON) -> None:
        """A whole response."""
        await self.begin(status, content_type, len(body))
        await self.write(body, more=False)

    async def begin(self, status: int, content_type: bytes, length_bytes: int | None = None) -> None:
        """Status and headers; chunked where the length is not given."""
        headers = [(b"content-type", content_type)]
        if length_bytes is not None:
            headers.append((b"content-length", b"%d" % length_bytes))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """A piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def gone(self) -> None:
        """Wait until the client, or we, closed the connection, or the answer is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def pause(self, for_s: float) -> None:
        """Let time pass, or less if the connection closes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await self.gone()

    async def unless_gone(self, work: Coroutine[Any, Any, _Made]) -> _Made:
        """What `work` comes to; `ClientGone`, and the work cancelled, if the connection closes first."""
        loop = asyncio.get_running_loop()
        made, gone = loop.create_task(work), loop.create_task(self.gone())
        try:
            await asyncio.wait((made, gone), return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                raise ClientGone
            return made.result()
        finally:
            for task in (made, gone):
                task.cancel()
            await asyncio.wait((made, gone))

    @contextmanager
    def when_gone(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` once if the connection closes while the block runs."""
        watch = asyncio.get_running_loop().create_task(self.gone())
        watch.add_done_callback(lambda task: None if task.cancelled() else act())
        try:
            yield
        finally:
            watch.cancel()

    async def say(self, raw: bytes, piece_bytes: int) -> None:
        """These very bytes, past everything that knows HTTP."""
        for at in range(0, len(raw), piece_bytes):
            self._transport.write(raw[at : at + piece_bytes])
            await asyncio.sleep(0)

    async def cut(self) -> None:
        """Close the connection after what was written so far."""
        self._transport.close()
        await self.gone()

    async def reset(self) -> None:
        """Close the connection so that the peer sees a reset."""
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()
        await self.gone()
