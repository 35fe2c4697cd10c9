"""Requests to pods over kept-alive connections, one pool for each pod.

Used for client requests, probes and scrapes. The only retry here: a kept-alive connection that turns out to be closed
is replaced by a new one, once. Candidates and retries on other pods are in `frontends/http/attempt.py`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from socket import gaierror
from typing import Any

import msgspec

from router.addresses import split_url, url_address
from router.config.credentials import tls_of
from router.config.pod_keys import key_headers
from router.config.schema import Limits
from router.engines.adapter import rank_headers
from router.errors import ConnectFailed, StaleConnection, UpstreamBroken, UpstreamTimeout, unexpected_status
from router.frontends.http.connection import Connection, UpstreamMessage
from router.frontends.http.headers import HeaderRules, request_head, request_message
from router.frontends.http.relay import RESPONSE, read_all
from router.request.inbound import Head, HeaderList
from router.types import NO_TLS_FILES, Pod, PodId, PodTls

IDLE_EXPIRY_S = 3.0
"""uvicorn-based engines close an idle connection after 5 s; ours must be closed earlier."""
COPIED_BYTES = 256 * 1024
"""A larger body is not copied behind its head, because that takes long."""
IDLE_SWEEP_S = 1.0
MAX_IDLE_CONNECTIONS = 256

_OF_PEERS = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT})
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""The router, not the pod, is why a connection cannot be opened."""

_UNPACKED = (b"accept-encoding", b"identity")
"""The pod, or a proxy in front of it, must not compress what the router reads."""
_PLAIN: HeaderList = [_UNPACKED, (b"user-agent", b"warmroute")]
_JSON: HeaderList = [*_PLAIN, (b"content-type", b"application/json")]


def _is_out_of_files() -> bool:
    """Whether no socket can be opened. The resolver then knows no name, and does not say why."""
    try:
        with socket.socket():
            return False
    except OSError as error:
        return error.errno in _LOCAL_ERRORS


class Reply:
    """One response that is being read. Always `close()` it; a fully read one returns its connection to the pool."""

    __slots__ = ("_closed", "_connection", "_pool", "headers", "pod", "pour", "read", "status")

    def __init__(self, pool: UpstreamPool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self._closed = False
        self.pod = pool.pod
        self.status = connection.status
        self.headers = connection.headers
        self.read = connection.read
        self.pour = connection.pour

    def close(self) -> None:
        """Return the connection to the pool. Idempotent: another exchange may own the connection by now."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection)


class UpstreamPool:
    """Connections to one pod, over the network or over a Unix socket; or to another server, with this `tls`."""

    def __init__(
        self,
        pod: PodId,
        url: str,
        limits: Limits,
        socket: str = "",
        served: Pod | None = None,
        tls: PodTls = NO_TLS_FILES,
    ) -> None:
        parts = split_url(url)
        self._bearer_file = served.bearer_file if served else ""
        self._bearer_env = served.bearer_env if served else ""
        self.has_key = bool(self._bearer_file or self._bearer_env)
        self.rank_headers: HeaderList = [
            (name.encode(), value.encode()) for name, value in (rank_headers(served) if served else {}).items()
        ]
        self.pod = pod
        self.limits = limits
        self.host_header = parts.netloc.encode()
        self.path_prefix = parts.path.rstrip("/").encode()
        self._host, self._port = url_address(url)
        self._socket = socket
        self._tls = tls_of(served.tls if served else tls) if parts.scheme == "https" else None
        self._idle: deque[Connection] = deque()
        self._closed = False

    @property
    def credentials(self) -> HeaderList:
        if not self.has_key:
            return []
        headers = key_headers(self._bearer_file, self._bearer_env)
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def exchange(self, message: UpstreamMessage) -> Reply:
        """Send one whole request and wait for the headers of its response.

        Raises `ConnectFailed`, `UpstreamBroken` or `UpstreamTimeout`. A kept-alive connection that closes before any
        byte of the response is replaced by a new one, once.
        """
        reused = self._take_idle()
        if reused is not None:
            reused.send(message)
            try:
                await reused.head()
                return self._accepted(reused)
            except StaleConnection:
                return await self._exchange_again(message)
        return await self.exchange_once(lambda: message)

    async def _exchange_again(self, message: UpstreamMessage) -> Reply:
        """Send a request again whose kept-alive connection died, most likely between two requests.

        If the pod accepts no connection now, the request may have crashed it: raises `UpstreamBroken`."""
        try:
            return await self.exchange_once(lambda: message)
        except ConnectFailed as error:
            raise UpstreamBroken(f"{error}, after it closed a connection without a response", pod=self.pod) from error

    async def exchange_once(
        self, message: Callable[[], UpstreamMessage], sent: Callable[[Connection], object] = lambda _: None
    ) -> Reply:
        """The same for a request that no pod may receive twice: over a new connection, and `message` is called after
        the connection is established. `sent` is called with it once it has the request.

        Raises like `exchange`, and what `message` raises.
        """
        connection = await self._connect()
        try:
            connection.send(message())
            sent(connection)
            await connection.head()
        except StaleConnection as error:
            raise UpstreamBroken(f"pod {self.pod}: {error}", pod=self.pod) from error
        except BaseException:
            connection.close()
            raise
        return self._accepted(connection)

    def _accepted(self, connection: Connection) -> Reply:
        """The response, whose headers have arrived. Raises `UpstreamBroken` where the pod refuses the router's key: the
        client would take a 401 for a refusal of its own."""
        reply = Reply(self, connection)
        if self.has_key and connection.status == HTTPStatus.UNAUTHORIZED:
            reply.close()
            why = "status 401: it does not accept the router's key (`auth` of the pod)"
            raise UpstreamBroken(f"pod {self.pod}: {why}", pod=self.pod, status=connection.status)
        return reply

    async def fetch(
        self, path: str, timeout_s: float, json: bytes | None = None, more: HeaderList | None = None
    ) -> bytes:
        """The body of the 200 response to a GET of `path`, or to a POST of `json`; one deadline for the whole exchange.
        `more`: headers to add. Raises `UpstreamError`."""
        method, headers = ("GET", _PLAIN) if json is None else ("POST", _JSON)
        message = self._own_message(method, path, [*headers, *(more or ())], json or b"")
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.exchange(message)
                body = await read_all(reply, RESPONSE)
        except TimeoutError as error:
            raise UpstreamTimeout(
                f"pod {self.pod}: {path}: no response within {timeout_s:g} s", pod=self.pod
            ) from error
        if reply.status != HTTPStatus.OK:
            raise unexpected_status(reply.status, path, self.pod, body)
        return body

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Send a request of the router itself and wait for the headers of its response. Raises like `exchange`."""
        more = [(name.encode(), value.encode()) for name, value in headers.items()]
        return await self.exchange(self._own_message(method, target, [*_PLAIN, *more], body))

    def _own_message(self, method: str, target: str, headers: HeaderList, body: bytes) -> bytes:
        headers = [*headers, *self.credentials]
        return request_message(method, self.path_prefix + target.encode(), self.host_header, headers, body)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        opened = partial(Connection, loop, self.limits, self.pod)
        try:
            tls = self._tls.current() if self._tls else None
            async with asyncio.timeout(self.limits.connect_timeout_s):
                if self._socket:
                    name = self._host if tls else None
                    return (await loop.create_unix_connection(opened, self._socket, ssl=tls, server_hostname=name))[1]
                return (await loop.create_connection(opened, self._host, self._port, ssl=tls))[1]
        except TimeoutError as error:
            why = f"not connected within {self.limits.connect_timeout_s:g} s"
            raise ConnectFailed(f"pod {self.pod}: {why}", pod=self.pod) from error
        except OSError as error:
            # A resolver that lacks a file or socket says anything, also in an errno.
            local = error.errno in _LOCAL_ERRORS or (error.errno not in _OF_PEERS and _is_out_of_files())
            refused = not local and not isinstance(error, (gaierror, ssl.SSLError))
            why = f"pod {self.pod}: cannot connect: {error}"
            raise ConnectFailed(why, pod=self.pod, refused=refused, local=local) from error

    def _take_idle(self) -> Connection | None:
        now_s = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and now_s - connection.idle_since_s < IDLE_EXPIRY_S:
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next exchange, or close it where its response was not read to the end."""
        if self._closed or not connection.reusable or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def expire_idle(self) -> None:
        """Close connections that have been idle for `IDLE_EXPIRY_S`. Called periodically."""
        now_s = time.monotonic()
        while self._idle and now_s - self._idle[0].idle_since_s >= IDLE_EXPIRY_S:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close idle connections; those of running exchanges are closed when they are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


class UpstreamPools:
    """Pools by pod: opened on first use, closed when the pod is removed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pools: dict[PodId, UpstreamPool] = {}

    def of(self, pod: Pod) -> UpstreamPool:
        pool = self._pools.get(pod.id)
        if pool is None:
            pool = self._pools[pod.id] = UpstreamPool(pod.id, pod.url, self._limits, pod.socket, pod)
        return pool

    def add(self, pod: Pod, limits: Limits) -> UpstreamPool:
        """A pool with limits of its own, which stays."""
        pool = self._pools[pod.id] = UpstreamPool(pod.id, pod.url, limits, served=pod)
        return pool

    def fetch(self, pod: Pod, path: str, timeout_s: float) -> Awaitable[bytes]:
        """GET a path of the pod: see `UpstreamPool.fetch`."""
        return self.of(pod).fetch(path, timeout_s)

    def post(self, pod: Pod, path: str, body: Mapping[str, Any], timeout_s: float) -> Awaitable[bytes]:
        """POST JSON to the pod's rank: see `UpstreamPool.fetch`."""
        pool = self.of(pod)
        return pool.fetch(path, timeout_s, msgspec.json.encode(body), pool.rank_headers)

    async def get_url(self, url: str, timeout_s: float, *, pod: Pod | None = None) -> bytes:
        """GET a URL over a connection of its own: see `UpstreamPool.fetch`."""
        parts = split_url(url)
        base = f"{parts.scheme}://{parts.netloc}"
        pool = UpstreamPool(base, base, self._limits, served=pod)
        try:
            return await pool.fetch(f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}", timeout_s)
        finally:
            pool.close()

    def remove(self, pod: PodId) -> None:
        """Close idle connections; running exchanges continue."""
        pool = self._pools.pop(pod, None)
        if pool is not None:
            pool.close()

    async def expire_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SWEEP_S)
            for pool in self._pools.values():
                pool.expire_idle()

    def close(self) -> None:
        for pod in list(self._pools):
            self.remove(pod)


class UpstreamSender:
    """Sends a client's request, with its own body or another one, to a pod, with the headers that a pod may receive."""

    def __init__(self, pool: Callable[[Pod], UpstreamPool], rules: HeaderRules) -> None:
        self.pool = pool
        self.rules = rules

    def send(self, head: Head, pod: Pod, body: bytes) -> Awaitable[Reply]:
        """Wait for the headers of the response. Raises `UpstreamError`."""
        pool = self.pool(pod)
        return pool.exchange(self._message(head, pool, body))

    def send_once(
        self,
        head: Head,
        pod: Pod,
        body: Callable[[], bytes],
        part: str = "",
        sent: Callable[[Connection], object] = lambda _: None,
    ) -> Awaitable[Reply]:
        """The same for a body that no pod may receive twice; `body` is called just before it is sent. `part`: see
        `Leg`; `sent`: see `exchange_once`."""
        pool = self.pool(pod)
        return pool.exchange_once(lambda: self._message(head, pool, body(), part), sent)

    def _message(self, head: Head, pool: UpstreamPool, body: bytes, part: str = "") -> UpstreamMessage:
        headers = self.headers(head, pool, part)
        sent = request_head(head.method, pool.path_prefix + head.target, pool.host_header, headers, body)
        return sent + body if len(body) <= COPIED_BYTES else (sent, body)

    def headers(self, head: Head, pool: UpstreamPool, part: str = "") -> HeaderList:
        """Those that the pod receives, apart from those of the connection."""
        headers = self.rules.upstream(head.headers)
        if head.trace is not None:
            headers = head.trace.upstream(headers, pool.pod, pool.host_header.decode(), part)
        if pool.has_key and (credentials := pool.credentials):
            headers = [header for header in headers if header[0] != b"authorization"] + credentials
        headers += (
            (b"x-request-id", head.id.encode()),
            (b"x-forwarded-for", head.peer.encode()),
            _UNPACKED,
            *pool.rank_headers,
        )
        return headers
