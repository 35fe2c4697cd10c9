"""Accepts TLS connections, and bounds their handshakes in number and time.

The event loop's own server bounds no number: clients that never finish a handshake would take all open files. A
protocol, and so `limits.max_connections`, sees only connections whose handshake is complete.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

HANDSHAKE_TIMEOUT_S = 10.0
MIN_HANDSHAKES = 16
"""Handshakes that are possible at a time while all connections are in use."""
ACCEPTED_AT_ONCE = 4
"""Connections that are accepted in one turn of the event loop."""
RETRY_S = 0.1
"""Pause after a connection could not be accepted, because no file is left."""


class TlsListener:
    """Serves `protocol` on a listening socket, like an `asyncio.Server`. If more handshakes than `free_connections` are
    in progress, the client that began the first one is disconnected."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        free_connections: Callable[[], int],
    ) -> None:
        self.sockets = (sock,)
        self._sock = sock
        self._context = context
        self._protocol = protocol
        self._free_connections = free_connections
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Those in progress, the oldest first."""
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None

    def open(self, backlog: int) -> None:
        """Start to accept connections."""
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        self._loop.add_reader(self._sock.fileno(), self._accept_waiting)

    def close(self) -> None:
        """Stop accepting connections. Handshakes continue."""
        self._loop.remove_reader(self._sock.fileno())
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Nothing: `close` is immediate."""

    def _accept_waiting(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._sock.fileno())
                self._retry = self._loop.call_later(
                    RETRY_S, self._loop.add_reader, self._sock.fileno(), self._accept_waiting
                )
                return
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        handshake = self._loop.create_task(self._shake_hands(accepted))
        self._handshakes[handshake] = None
        handshake.add_done_callback(lambda ended: self._handshakes.pop(ended, None))
        if len(self._handshakes) > max(self._free_connections(), MIN_HANDSHAKES):
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        with suppress(OSError):  # the client sent no TLS, refused the certificate, disconnected or was late
            await self._loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
