"""One HTTP request that the picker sends to a pod itself: the gateway passes the response on to its client, piece by
piece. Source: `StreamedImmediateResponse` of Envoy's external_processor.proto."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

import grpc

from router.frontends.extproc.gateway_exchange import CHUNK_BYTES, GatewayExchange, GatewayTerms
from router.frontends.extproc.messages import ProcessingResponse
from router.request.inbound import EVENT_STREAM, HeaderList, media_type

MAX_WAITING = 4
"""Messages that wait for the gateway before the pod does."""


class AnsweringExchange(GatewayExchange):
    """A `Downstream` whose pieces a task writes, one after the other, in the speed of the gateway."""

    answers = True

    def __init__(self, call: Any, terms: GatewayTerms) -> None:
        super().__init__(call, terms)
        self._messages = deque[bytes]()
        self._writer: asyncio.Task[None] | None = None

    async def end(self) -> None:
        """Wait until the gateway has all of the response. One that broke is not to look whole."""
        if not self.started:
            return
        if not await self._drained():
            self.was_reset = True
        elif not self.response_complete:
            await self._call.abort(grpc.StatusCode.UNAVAILABLE, "warmroute picker: the response has broken")

    # --- `Downstream` ---

    def start(self, status: int, headers: HeaderList) -> None:
        self._answer, self.sends_events = headers, media_type(dict(headers)) == EVENT_STREAM
        self.body = b""
        self._memory.release(self)
        message = ProcessingResponse()
        sent = message.streamed_immediate_response.headers_response.headers.headers
        for name, value in [(b":status", b"%d" % status), *headers]:
            sent.add(key=name, raw_value=value)
        self._send(message)

    def put(self, piece: bytes) -> bool:
        for begin in range(0, len(piece), CHUNK_BYTES):
            self._send_piece(piece[begin : begin + CHUNK_BYTES], ends=False)
        return len(self._messages) <= MAX_WAITING

    async def ready(self) -> None:
        """Wait until the gateway has taken what was put. One whose client never reads is left."""
        if self._writer is None or self._writer.done():
            await asyncio.sleep(0)
            return
        self.was_slow = True
        if not await self._drained() and self._task is not None:
            self._task.cancel()
            await asyncio.sleep(0)

    async def _drained(self) -> bool:
        """Wait until the gateway has taken what was put. One that takes nothing for a while gets a status after what
        gRPC has of the response: return False."""
        waiting = {self._writer} if self._writer is not None else set()
        while waiting:
            before = len(self._messages)
            _, waiting = await asyncio.wait(waiting, timeout=self._limits.slow_read_timeout_s)
            if waiting and len(self._messages) == before:
                waiting.pop().cancel()
                why = "warmroute picker: the response was not read"
                with suppress(TimeoutError, grpc.aio.BaseError):
                    async with asyncio.timeout(0):
                        await self._call.abort(grpc.StatusCode.UNAVAILABLE, why)
                return False
        return True

    def finish(self) -> None:
        self._send_piece(b"", ends=True)
        self.response_complete = True

    def _send_piece(self, piece: bytes, *, ends: bool) -> None:
        message = ProcessingResponse()
        body = message.streamed_immediate_response.body_response
        body.body, body.end_of_stream = piece, ends
        self._send(message)

    def _send(self, message: Any) -> None:
        self._messages.append(message.SerializeToString())
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        """Where the gateway has reset the stream, gRPC cancels the request."""
        with suppress(grpc.aio.BaseError):
            while self._messages:
                await self._call.write(self._messages.popleft())
        self._messages.clear()
