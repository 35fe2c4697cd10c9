"""Answers on both listeners while tokenizers are loaded, which can take many seconds.

A process of its own answers, because loading holds the interpreter. It ends before the public port is bound for
requests; the admin socket is open from the start, and what it has not accepted by then waits for the router.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from router.admission.gate import AdmissionGate
from router.config.certificates import ListenCertificate
from router.config.listen_schema import Listen
from router.config.schema import Limits
from router.errors import NoReadyPod
from router.frontends.http.app import PROBE_PATHS, App, bare_app, probe_answer
from router.frontends.http.exchange import ReceivedRequest
from router.frontends.http.http_edge import AnyExchange, HttpEdge
from router.frontends.http.listen_sockets import bind_port
from router.frontends.http.server import SocketServer

PARENT_CHECK_S = 0.2


@contextmanager
def answering_while_starting(listen: Listen, admin: socket.socket, limits: Limits) -> Iterator[None]:
    """`/livez` is 200, everything else 503, until the context ends. Raises `ConfigError` if the port is taken."""
    parent = os.getpid()
    with bind_port(listen.host, listen.port, exclusive=True) as public:
        process = os.fork()
        if not process:
            _answer(parent, listen, public, admin, limits)
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _answer(parent: int, listen: Listen, public: socket.socket, admin: socket.socket, limits: Limits) -> None:
    """Answer until the parent ends. Does not return: nothing of the parent may run in this process."""
    try:
        gc.enable()
        asyncio.run(_serve(parent, listen, public, admin, limits))
    finally:
        os._exit(0)


async def _serve(parent: int, listen: Listen, public: socket.socket, admin: socket.socket, limits: Limits) -> None:
    app = App(_StartingEdge(limits), bare_app(), AdmissionGate())
    context = ListenCertificate(listen.tls).context if listen.tls else None
    await SocketServer(app, public, context).open()
    await SocketServer(app, admin).open()
    while os.getppid() == parent:  # noqa: ASYNC110, because no event reports it
        await asyncio.sleep(PARENT_CHECK_S)


class _StartingEdge(HttpEdge):
    """Answers every request itself, reads no body and closes each connection."""

    def refusal(self, received: ReceivedRequest, methods: frozenset[str]) -> NoReadyPod:
        return NoReadyPod("The router is starting; retry later.")

    async def serve(self, client: AnyExchange) -> None:
        if client.received.path not in PROBE_PATHS:
            await super().serve(client)
            return
        status, body = probe_answer(client.received.path, is_ready=False)
        client.keep_alive = False
        client.start(status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        client.put(body)
        client.finish()
