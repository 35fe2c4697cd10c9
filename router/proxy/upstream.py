"""How do bytes get to a pod and back?

A pool of kept-alive connections to one pod. This file knows nothing of models, candidates or retries beyond one: a
kept-alive connection that died unseen is replaced once.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from router.errors import ConnectFailed, StaleConnection, UpstreamBroken
from router.proxy.connection import Connection, UpstreamTimeouts

IDLE_EXPIRY_S = 3.0
"""uvicorn-based engines close an idle connection after 5 s; ours must go first."""
MAX_IDLE_CONNECTIONS = 256


class Reply:
    """One answer being read. Always `close()` it; a fully read one gives its connection back."""

    __slots__ = ("_closed", "_connection", "_pool", "headers", "pod", "pour", "read", "status")

    def __init__(self, pool: UpstreamPool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self._closed = False
        self.pod = pool.pod
        """The id of the pod whose answer it is."""
        self.status = connection.status
        self.headers = connection.headers
        self.read = connection.read
        self.pour = connection.pour

    def close(self) -> None:
        """Give the connection back. Again, it changes nothing: by then another exchange may have it."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection)


class UpstreamPool:
    """Connections to one pod: over the network, or over a Unix socket where one is named."""

    def __init__(self, pod: str, url: str, timeouts: UpstreamTimeouts, socket: str = "") -> None:
        parts = urlsplit(url)
        self.pod = pod
        self.timeouts = timeouts
        self.host_header = parts.netloc.encode()
        self.path_prefix = parts.path.rstrip("/").encode()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._socket = socket
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: deque[Connection] = deque()

    async def exchange(self, message: bytes) -> Reply:
        """Send one whole request and wait for the head of its answer.

        Raises `ConnectFailed`, `UpstreamBroken` or `UpstreamTimeout`. A kept-alive connection that turns out dead
        before any byte of an answer is replaced by a new one, once.
        """
        reused = self._take_idle()
        if reused is not None:
            reused.send(message)
            try:
                await reused.head()
                return Reply(self, reused)
            except StaleConnection:
                pass  # closed between two requests; the pod has most likely not seen this one
        return await self.exchange_once(lambda: message)

    async def exchange_once(self, message: Callable[[], bytes]) -> Reply:
        """The same for what no pod may get twice: over a new connection, and `message` is asked for once that stands.

        Raises like `exchange`, and what `message` raises.
        """
        connection = await self._connect()
        try:
            connection.send(message())
            await connection.head()
        except StaleConnection as error:
            raise UpstreamBroken(f"pod {self.pod}: {error}", pod=self.pod) from error
        except BaseException:
            connection.close()
            raise
        return Reply(self, connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        opened = partial(Connection, loop, self.timeouts, self.pod)
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                if self._socket:
                    name = self._host if self._tls else None
                    _, connection = await loop.create_unix_connection(
                        opened, self._socket, ssl=self._tls, server_hostname=name
                    )
                else:
                    _, connection = await loop.create_connection(opened, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no connection within {self.timeouts.connect_s:g} s"
            raise ConnectFailed(f"pod {self.pod} cannot be reached: {why}", pod=self.pod) from error
        return connection

    def _take_idle(self) -> Connection | None:
        now_s = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and now_s - connection.idle_since_s < IDLE_EXPIRY_S:
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next exchange, or close it if its answer was not read to the end."""
        if not connection.reusable or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def expire_idle(self) -> None:
        """Close connections that have been idle for too long; called now and then."""
        now_s = time.monotonic()
        while self._idle and now_s - self._idle[0].idle_since_s >= IDLE_EXPIRY_S:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close what is idle; exchanges under way are closed by their owners."""
        while self._idle:
            self._idle.pop().close()
