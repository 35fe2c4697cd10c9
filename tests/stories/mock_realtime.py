"""The websocket of a mock engine: sends every text message back, and answers a close."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from hashlib import sha1
from typing import Any, cast

_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""The constant of every websocket handshake (RFC 6455, 1.3)."""
_CLOSE = 8
PATH = b"/v1/realtime"


class MockRealtime(asyncio.Protocol):
    """One websocket; uvicorn creates it for a request to upgrade, and repeats the request's head."""

    def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
        self._connections = server_state.connections
        self._received = b""
        self._is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Called when the engine drains."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._is_open:
            head, found, self._received = self._received.partition(b"\r\n\r\n")
            if found:
                self._open(head)
        while self._is_open and (message := self._next()) is not None:
            opcode, payload = message
            self.transport.write(frame(opcode, payload))
            if opcode == _CLOSE:
                self.transport.close()
                return

    def _open(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        if lines[0].split(b" ")[1].partition(b"?")[0] != PATH:
            self.transport.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
            return
        self._is_open = True
        accept = b64encode(sha1(headers[b"sec-websocket-key"] + _KEY, usedforsecurity=False).digest())
        switched = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: %b\r\n\r\n" % accept
        self.transport.write(b"HTTP/1.1 101 Switching Protocols\r\n" + switched)

    def _next(self) -> tuple[int, bytes] | None:
        """(opcode, payload) of the next whole message of the client, which masks them."""
        data = self._received
        if len(data) < 6:
            return None
        length, start = data[1] & 127, 2
        if length > 125:
            size = 2 if length == 126 else 8
            length, start = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
        mask, end = data[start : start + 4], start + 4 + length
        if len(data) < end:
            return None
        payload, self._received = data[start + 4 : end], data[end:]
        return data[0] & 15, bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def frame(opcode: int, payload: bytes) -> bytes:
    """One unmasked message."""
    length = len(payload)
    if length < 126:
        return bytes([128 | opcode, length]) + payload
    if length < 1 << 16:
        return bytes([128 | opcode, 126]) + length.to_bytes(2, "big") + payload
    return bytes([128 | opcode, 127]) + length.to_bytes(8, "big") + payload
