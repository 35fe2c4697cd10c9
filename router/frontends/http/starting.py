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

from starlette.types import Receive, Scope, Send

from router.admission.gate import AdmissionGate
from router.config.certificates import ListenCertificate
from router.config.listen_schema import Listen
from router.config.schema import Limits
from router.errors import NoReadyPod
from router.frontends.http.app import App
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.listen_sockets import bind_port
from router.frontends.http.probes import PROBE_PATHS, answer_probe
from router.frontends.http.request_bodies import refuse
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
    app = App(HttpEdge(limits), _starting, AdmissionGate())
    context = ListenCertificate(listen.tls).context if listen.tls else None
    await SocketServer(app, public, context).open()
    await SocketServer(app, admin).open()
    while os.getppid() == parent:  # noqa: ASYNC110, because no event reports it
        await asyncio.sleep(PARENT_CHECK_S)


async def _starting(scope: Scope, _receive: Receive, send: Send) -> None:
    """An ASGI application that reads no body and closes each connection."""
    path = scope["path"]
    if path in PROBE_PATHS:
        await answer_probe(send, path, is_ready=False)
    else:
        await refuse(send, NoReadyPod("The router is starting; retry later."))
