"""How does a request reach the edge without a web framework in between?

uvicorn's HTTP protocol, except for what goes on to a pod: such a request becomes an `Exchange` instead of one of
uvicorn's cycles, at the same place in the same pipeline, so that keep-alive, pipelining, back-pressure and graceful
shutdown are uvicorn's own for both. Everything else is served by the ASGI application, untouched. This file reads no
body.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from functools import cache
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.api.app import App
from router.api.exchange import Exchange, Line, Received
from router.errors import BodyTooLarge


class EdgeProtocol(HttpToolsProtocol):
    """One client's connection to an `App`; give this class to uvicorn as `http`."""

    cycle: Any
    """The request that is being parsed or was last: one of uvicorn's, or an exchange."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config.app, App)
        self._edge, allowed = config.app.edge, config.forwarded_allow_ips
        self._idle_since_s: float | None = None
        self._serving: Exchange | None = None
        """The exchange whose turn it is or was; those after it wait in the pipeline."""
        self._proxies = _proxies(",".join(allowed) if isinstance(allowed, list) else allowed)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._line = Line(transport, self.flow, self.tasks, self.loop, self.on_response_complete)

    def on_response_complete(self) -> None:
        """As uvicorn has it, but with one timer for many requests."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which nothing has been asked for too long; look again when the next one may be."""
        self.timeout_keep_alive_task = None
        if self._idle_since_s is None or self.transport.is_closing():
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            self.transport.close()

    def _unset_keepalive_if_required(self) -> None:
        """The timer goes on: it finds out by itself that the connection is in use."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._serving is not None:
            self._serving.gone()

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._idle_since_s = None
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
        method = self.parser.get_method().decode("ascii")
        if self._edge.takes(method, path):
            target = url.path + b"?" + url.query if url.query else url.path
            self._open(Received(method, path, target, self.headers, self._peer()))
        else:
            self._hand_to_the_application()

    def on_body(self, body: bytes) -> None:
        if not isinstance(self.cycle, Exchange):
            super().on_body(body)
        elif not self.cycle.received.refusal and not self.cycle.take(body, self._edge.max_body_bytes):
            most = self._edge.max_body_bytes
            self.cycle.refuse(BodyTooLarge(f"The body is larger than the {most} bytes that are taken."))

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, Exchange):
            self.cycle.is_whole()
        else:
            super().on_message_complete()

    # --- exchanges ---

    def _open(self, received: Received) -> None:
        received.refusal = self._edge.refusal(received)
        http_1_0 = self.parser.get_http_version() == "1.0"
        keep_alive = not http_1_0 and self.parser.should_keep_alive()
        before = self.cycle
        exchange = Exchange(received, keep_alive, http_1_0, self.expect_100_continue, self._line, self._edge.serve)
        self.cycle = exchange
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """It is this one's turn."""
        if isinstance(cycle, Exchange):
            self._serving = cycle
            cycle.is_first()
        else:
            super()._start_asgi_task(cycle, app)

    def _hand_to_the_application(self) -> None:
        """Go on as if uvicorn had followed the message from its begin."""
        url, headers, expects_100 = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects_100
        self.headers += headers
        super().on_headers_complete()

    def _peer(self) -> str:
        """Who asks: the client, or whom a proxy that we trust names."""
        host = self.client[0] if self.client else ""
        forwarded = b", ".join([value for name, value in self.headers if name == b"x-forwarded-for"])
        if forwarded and host in self._proxies.trusted_hosts:
            return self._proxies.trusted_hosts.get_trusted_client_address(forwarded.decode("latin-1"))[0] or host
        return host


@cache
def _proxies(allowed: str) -> ProxyHeadersMiddleware:
    """Knows which proxies are trusted: uvicorn's `forwarded_allow_ips`."""
    return ProxyHeadersMiddleware(_nothing, allowed)


async def _nothing(_scope: object, _receive: object, _send: object) -> None:
    """The application behind a middleware that is only asked whom it trusts."""
