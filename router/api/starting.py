"""Answers on the public port while tokenizers are loaded, which can take many seconds.

A process of its own answers, because loading holds the interpreter and workers are forked afterwards, which a process
with threads must not do. It ends before the port is bound for requests.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from router.api.error_responses import error_body, error_headers
from router.api.listen_sockets import bind_port
from router.config.certificates import ListenCertificate
from router.config.listen_schema import Listen
from router.errors import NoReadyPod

CLIENT_TIMEOUT_S = 5.0
PARENT_CHECK_S = 0.2
_STARTING = NoReadyPod("The router is starting; retry later.")


@contextmanager
def answering_while_starting(listen: Listen) -> Iterator[None]:
    """`/livez` is 200, everything else 503, until the context ends. Raises `ConfigError` if the port is taken."""
    with bind_port(listen.host, listen.port, exclusive=True) as bound:
        process = os.fork()
        if not process:
            _answer(bound, listen)
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _answer(bound: socket.socket, listen: Listen) -> None:
    """Answer until the parent ends. Does not return: nothing of the parent may run in this process."""
    try:
        parent = os.getppid()
        server = ThreadingHTTPServer(bound.getsockname()[:2], _StartingHandler, bind_and_activate=False)
        server.socket = bound
        if listen.tls:
            context = ListenCertificate(listen.tls).context
            server.socket = context.wrap_socket(bound, server_side=True, do_handshake_on_connect=False)
        server.server_activate()
        Thread(target=server.serve_forever, daemon=True).start()
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
    finally:
        os._exit(0)


class _StartingHandler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        if self.path == "/livez":
            status, body = 200, b'{"status":"alive"}'
        elif self.path == "/readyz":
            status, body = 503, b'{"status":"not ready"}'
        else:
            status, body = 503, error_body(_STARTING)
        self.send_response_only(status)
        for name, value in error_headers(_STARTING, body):
            self.send_header(name.decode(), value.decode())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""
