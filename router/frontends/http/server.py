"""Serves the public and the admin listener, and stops without losing requests.

On SIGTERM, `/readyz` fails and each response closes its connection, so that load balancers stop sending. After a delay
the server stops accepting connections, lets running responses finish and closes idle connections. SIGINT skips the
delay. The admin listener is open until the last response is complete. The log gets a line when the server serves, when
it begins to stop and when it has stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import structlog
import uvicorn

from router.addresses import join_address
from router.config.schema import AdminListen
from router.errors import ConfigError
from router.frontends.http.client_deadlines import Newcomers, has_unread
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.protocol import EdgeProtocol
from router.frontends.http.request_head import host_in, network_of

HANDSHAKE_TIMEOUT_S = 10.0
ACCEPTED_AT_ONCE = 4
"""Connections that are accepted in one turn of the event loop."""
RETRY_S = 0.1
"""Pause after a connection could not be accepted, because no file is left."""


@dataclass(slots=True, eq=False)
class TlsListener:
    """Serves `protocol` on a listening socket, like an `asyncio.Server`, which bounds no handshakes: clients that never
    finish one would take all open files."""

    _sock: socket.socket
    _context: ssl.SSLContext
    _protocol: Callable[[], asyncio.Protocol]
    _handshakes: Newcomers
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _retry: asyncio.TimerHandle | None = None

    @property
    def sockets(self) -> tuple[socket.socket]:
        return (self._sock,)

    def open(self, backlog: int) -> None:
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
                accepted, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._sock.fileno())
                self._retry = self._loop.call_later(
                    RETRY_S, self._loop.add_reader, self._sock.fileno(), self._accept_waiting
                )
                return
            accepted.setblocking(False)
            handshake = self._loop.create_task(self._shake_hands(accepted))
            self._handshakes.add(handshake.cancel, network_of(host_in(address)))
            handshake.add_done_callback(lambda ended: self._handshakes.networks.pop(ended.cancel, None))

    async def _shake_hands(self, accepted: socket.socket) -> None:
        with suppress(OSError):  # the client sent no TLS, refused the certificate, disconnected or was late
            await self._loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )


MAX_POLLS = 100
ADMIN_DRAIN_TIMEOUT_S = 2

log = structlog.get_logger()


class SocketServer(uvicorn.Server):
    """Serves an application on a bound socket while something else runs."""

    def __init__(self, app: HttpEdge, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=EdgeProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=ADMIN_DRAIN_TIMEOUT_S,
        )
        super().__init__(config)
        self.sock = sock

    async def open(self) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self.sock])

    async def close(self) -> None:
        await self.shutdown([self.sock])


class DrainingServer(uvicorn.Server):
    """Serves an `HttpEdge`, and runs `admin` meanwhile. After SIGTERM it accepts connections for another `delay_s`. For
    the log: `summary` is what it serves; `figures` are numbers of requests."""

    def __init__(
        self,
        config: uvicorn.Config,
        admin: SocketServer,
        *,
        delay_s: float,
        summary: Callable[[], Mapping[str, object]] = dict,
        figures: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        super().__init__(config)
        self._figures = figures
        self._created_s = time.monotonic()
        self._summary = summary
        self.admin = admin
        self._delay_s = delay_s
        self._drains = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and not self.should_exit:
            self._drains = True
            cast(HttpEdge, self.config.app).is_stopping = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        await super().startup(sockets if context is None else [])
        if context is not None:
            self.servers = [self._tls_listener(sock, context) for sock in sockets or []]  # type: ignore[misc]
        await self.admin.open()
        if self.started:
            url = ",".join(
                address_of(sock, tls=self.config.is_ssl) for server in self.servers for sock in server.sockets
            )
            log.info("serving", url=url, admin=address_of(self.admin.sock), **self._summary())

    def _tls_listener(self, sock: socket.socket, context: ssl.SSLContext) -> TlsListener:
        config, state = self.config, self.server_state
        protocol = partial(EdgeProtocol, config, state, self.lifespan.state)
        limits = cast(HttpEdge, config.app).limits
        handshakes = Newcomers(lambda: limits.max_connections - len(state.connections))
        listener = TlsListener(sock, context, protocol, handshakes)
        listener.open(config.backlog)
        return listener

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        began_s, delay_s = time.monotonic(), self._delay_s if self._drains else 0.0
        log.info("draining", delay_s=delay_s, timeout_s=self.config.timeout_graceful_shutdown, **self._figures())
        await asyncio.sleep(delay_s)
        cast(HttpEdge, self.config.app).is_stopping = True
        await self._accept_pending()
        await super().shutdown(sockets)
        await self.admin.close()
        ended_s = time.monotonic()
        took = {"drain_s": round(ended_s - began_s, 3), "uptime_s": round(ended_s - self._created_s, 3)}
        log.info("stopped", **took, **self._figures())

    async def _accept_pending(self) -> None:
        """Accept the connections in the listening queues, which would otherwise be reset. Accepting one takes two turns
        of the event loop."""
        listening, quiet_polls = [sock.fileno() for server in self.servers for sock in server.sockets], 0
        for _ in range(MAX_POLLS):
            quiet_polls = 0 if has_unread(*listening) else quiet_polls + 1
            if quiet_polls == 2:
                return
            await asyncio.sleep(0)


# --- sockets ---

ALL_ADDRESSES = "::"
"""All addresses of this machine, IPv6 and IPv4. The wildcard 0.0.0.0 has only the latter."""
_OPTIONS = {"listen": "set listen.port or --port", "admin": "set admin.port or --admin-port"}


def bind_port(host: str, port: int, *, exclusive: bool = False, section: str = "listen") -> socket.socket:
    """A socket bound to the address, not listening yet; for a name with several addresses, to an IPv4 one. Unless
    `exclusive`, other routers can bind it as well. Raises `ConfigError`, which names the section of router.yaml."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        with ExitStack() as on_error:
            bound = on_error.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != ALL_ADDRESSES)
            if not exclusive:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(f"{section}: cannot bind {join_address(host, port)}: {error}; {_OPTIONS[section]}") from error
    return bound


def open_port(bound: socket.socket, backlog: int) -> None:
    """Listen on the clients' port. Raises `ConfigError` if another process does so since it was bound."""
    try:
        bound.listen(backlog)
    except OSError as error:
        raise ConfigError(f"listen: cannot open {address_of(bound)}: {error}; {_OPTIONS['listen']}") from error


def bind_admin(listen: AdminListen) -> socket.socket:
    """Listens at once, so that no other process can take the address: connections wait until the router serves."""
    if listen.socket:
        return _listen_unix(listen.socket)
    bound = bind_port(listen.host, listen.port, exclusive=True, section="admin")
    bound.listen()
    return bound


def _listen_unix(path: str) -> socket.socket:
    """Replaces the socket file of a router that has ended. Only the router's own user can connect."""
    try:
        with ExitStack() as on_error:
            bound = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if Path(path).is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
                    probe.connect(path)
                    raise ConfigError(f"admin.socket: {path} is in use by another process")
                Path(path).unlink()
            before = os.umask(0o177)
            try:
                bound.bind(path)
            finally:
                os.umask(before)
            bound.listen()
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(f"admin.socket: cannot bind {path}: {error}") from error
    return bound


def address_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The address as a URL, or as `unix:PATH`."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    return f"http{'s' if tls else ''}://{join_address(*sock.getsockname()[:2])}"
