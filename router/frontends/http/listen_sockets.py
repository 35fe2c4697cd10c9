"""Binds the sockets that the router listens on."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from router.addresses import join_address
from router.config.schema import AdminListen
from router.errors import ConfigError

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
