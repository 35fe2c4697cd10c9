"""Parses a client's connection and serves requests for pods without a web framework.

Extends uvicorn's HTTP protocol: a request for a pod becomes an `Exchange`; the ASGI application serves every other
request. Keep-alive, pipelining, back-pressure and graceful shutdown are uvicorn's. This module decodes no body.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.errors import MalformedRequest, MethodNotAllowed, RequestTimeout, RouterError, Saturated
from router.frontends.http.app import App
from router.frontends.http.client_deadlines import ClientDeadlines, ClientTimeouts
from router.frontends.http.client_websocket import asks_for_websocket, taken_over, websocket_refusal
from router.frontends.http.cors import answer_preflight, is_preflight
from router.frontends.http.exchange import ClientConnection, Exchange, ReceivedRequest, Serve
from router.frontends.http.forwarded_for import forwarded_for, trusted_proxies
from router.frontends.http.request_head import check_head, head_without_upgrade, parse_refusal
from router.frontends.http.request_target import read_target
from router.request.error_responses import headers_too_large, too_many_headers
from router.request.inbound import first_values

IPV4_IN_IPV6 = "::ffff:"
MAX_COMPARED = 128
"""Connections that are compared to close one of them. Comparing thousands for each new one would cost milliseconds."""
LINGER_S = 0.2
"""When the server stops, a connection is closed after being idle for this time."""
SLOW_REQUEST_S = 5.0
"""A request that is incomplete for longer may be dropped when all connections are in use."""
MAX_PIPELINED = 4
"""Requests that a client may send ahead of their responses. The connection is read until then, because a disconnect is
noticed only while reading."""

MAX_AHEAD = 64
"""Requests that are accepted ahead of their responses where they arrive in one piece. 9,000 small requests fit into a
piece and would block the event loop for 100 ms."""
_GET = frozenset({"GET"})


class EdgeProtocol(HttpToolsProtocol):
    """One client's connection to an `App`. Passed to uvicorn as `http`."""

    cycle: Any
    """The last request that was parsed or is being parsed: a cycle of uvicorn's, or an `Exchange`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = httptools.HttpRequestParser(self)  # uvicorn's also parses what follows `Connection: close`
        assert isinstance(config.app, App)
        self._served, self._edge, allowed = config.app, config.app.edge, config.forwarded_allow_ips
        self._limits = self._edge.limits
        self._max_headers = self._limits.max_headers
        self._serving: Exchange | None = None
        """The exchange that is served or was served last; later ones wait in the pipeline."""
        self._proxies = trusted_proxies(",".join(allowed) if isinstance(allowed, list) else allowed)
        self._receiving = False
        """Whether a request is incomplete."""
        self._boundary_seen = False
        """Whether the bytes being parsed begin or end a request."""
        self._unread_bytes = 0
        """Bytes since the last complete part of a request; bounds headers that do not end."""
        self._rejected = False
        """Whether further bytes of this client are ignored."""
        self._host = ""
        """Address of the client, or of a proxy."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client:  # an IPv4 client of a listener for IPv6 and IPv4 has the address ::ffff:a.b.c.d
            self.client = self.client[0].removeprefix(IPV4_IN_IPV6), self.client[1]
            self._host = self.client[0]
        self._connection = ClientConnection(
            transport, self.flow, self.tasks, self.loop, self.on_response_complete, self._edge.body_memory
        )
        limits = self._limits
        timeouts = ClientTimeouts(
            self.timeout_keep_alive, limits.request_timeout_s, limits.write_timeout_s, limits.slow_read_timeout_s
        )
        self._deadlines = ClientDeadlines(self.loop, transport, timeouts, self._too_late)
        self._set_deadline()
        if len(self.connections) > limits.max_connections and not self._close_longest_waiting():
            most = f"{limits.max_connections} (limits.max_connections; fewer on the admin port)"
            self._reject_client(Saturated(f"The number of connections is limited to {most}; retry later."))

    @property
    def waits_for_head(self) -> bool:
        """Whether no request is being received or served, except for the beginning of a head."""
        return self.cycle is None and not self._rejected and not self.transport.is_closing()

    @property
    def is_slow(self) -> bool:
        """Whether a request has been incomplete for a while, and no earlier one is being served."""
        return (
            self._receiving
            and not (self.pipeline or self._rejected or self.transport.is_closing())
            and self.loop.time() - self._deadlines.waiting_since_s > SLOW_REQUEST_S
        )

    def _close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for the head of a request, or else for the rest of one, among
        the first `MAX_COMPARED`. Returns whether there is one."""
        compared = cast(list[EdgeProtocol], list(islice(self.connections, MAX_COMPARED)))
        waiting = [other for other in compared if other is not self and other.waits_for_head]
        waiting = waiting or [other for other in compared if other.is_slow]
        if waiting:
            min(waiting, key=lambda other: other._deadlines.waiting_since_s).transport.close()
        return bool(waiting)

    def data_received(self, data: bytes) -> None:
        if self._rejected:
            return
        self._unread_bytes += len(data)
        try:
            rest = self._feed(data)
            while rest is not None:
                if self._begins_websocket():
                    self._serve_websocket(bytes(rest))
                    return
                self._repeat_without_upgrade()
                rest = self._feed(rest)
        except httptools.HttpParserError as error:
            self._reject_client(parse_refusal(error))
        if self._boundary_seen and not self._rejected:
            self._boundary_seen = False
            self._set_deadline()
        if self._unread_bytes > self._limits.max_header_bytes:
            self._reject_client(headers_too_large(self._limits))

    def _feed(self, data: bytes | memoryview) -> memoryview | None:
        """Parse these bytes. Returns those after a head that requests an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return memoryview(data)[upgrade.args[0] :]
        return None

    def _repeat_without_upgrade(self) -> None:
        """Parse the last head again without its Upgrade header, as if the client had not sent it (RFC 9110 7.8).
        httptools does not parse the body of a request to upgrade: it would become the next request."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head_without_upgrade(method, self.url, version, self.headers))

    def _begins_websocket(self) -> bool:
        """Whether the head that was just parsed begins a websocket that a pod serves."""
        is_idle = self.cycle is None or (self.cycle.response_complete and not self.pipeline)
        path, _, fault = read_target(self.url)
        is_known = not fault and path in self._edge.websocket_paths
        return is_idle and is_known and asks_for_websocket(self.parser, self.headers)

    def _serve_websocket(self, rest: bytes) -> None:
        """Leave the connection to a websocket. `rest`: what follows its head."""
        (path, target, _), headers, named = read_target(self.url), self.headers, first_values(self.headers)
        received = ReceivedRequest("GET", path, target, headers, named, self._host)
        self._admit(received, _GET)
        received.refusal = received.refusal or websocket_refusal(headers, named, self._edge.cors)
        self._rejected = True  # no further request on this connection
        self._deadlines.end()
        client = taken_over(self.transport, rest, self.connection_lost)
        self.tasks.add(task := self.loop.create_task(self._edge.serve_websocket(received, client)))
        task.add_done_callback(self.tasks.discard)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadlines.await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadlines.drained()

    def on_response_complete(self) -> None:
        """As in uvicorn, but with `ClientDeadlines` in place of a timer per request. An idle connection keeps no
        request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._deadlines.await_reading()
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._drop_served()
        self._set_deadline()

    def _drop_served(self) -> None:
        """Free the last request, if it is complete and so is its response."""
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and not cycle.more_body:
            self.cycle = self._serving = None
            self.scope = None  # type: ignore[assignment]

    def _set_deadline(self) -> None:
        """Set the deadline for the client's next action."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (self.pipeline or not cycle.more_body):
            self._deadlines.disarm()
        elif self._receiving:
            self._deadlines.await_rest_of_request()
        else:
            self._deadlines.await_request()

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: uvicorn's timer is never set."""

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops. The next response to begin closes the connection; an idle connection
        is closed after `LINGER_S`."""
        cycle = self.cycle
        if cycle is not None and not (isinstance(cycle, Exchange) and cycle.started):
            cycle.keep_alive = False
        self._deadlines.shorten(LINGER_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadlines.end()
        if self._serving is not None:
            self._serving.disconnect()
        for cycle in dict.fromkeys((self._serving, self.cycle, *(cycle for cycle, _ in self.pipeline))):
            if isinstance(cycle, Exchange) and not cycle.began:
                cycle.release_body()
                self._edge.abandoned(cycle.received)
        self._connection.on_complete = lambda: None  # breaks a reference cycle

    # --- rejected clients ---

    def _too_late(self) -> None:
        timeout_s = self._limits.request_timeout_s
        self._reject_client(RequestTimeout(f"Request incomplete after {timeout_s:g} s (limits.request_timeout_s)."))

    def _reject_client(self, error: RouterError) -> None:
        """Stop reading from this client. Requests that were received are answered, then the connection is closed."""
        self._rejected = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False
            if not cycle.more_body:
                return
            if self.pipeline and not isinstance(cycle, Exchange):
                cycle = self._replace_last_request()
            if isinstance(cycle, Exchange):
                cycle.refuse(error)
                return
        elif cycle is None or not cycle.more_body:
            self.transport.write(self._edge.standalone_error(error))
        self.transport.close()
        self._deadlines.await_reading()

    def _replace_last_request(self) -> Exchange:
        """Replace the last request, which waits in the pipeline for the application, by an exchange."""
        received = ReceivedRequest("", "", b"", [], {}, self._host)
        self.cycle = exchange = Exchange(received, False, True, False, self._connection, self._edge.serve)
        self.pipeline[0] = exchange, self.app  # type: ignore[assignment]
        return exchange

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._receiving = self._boundary_seen = True
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self.headers
        headers.append((name.lower(), value))
        if len(headers) > self._max_headers:
            raise too_many_headers(self._limits)

    def on_headers_complete(self) -> None:
        parser, headers = self.parser, self.headers
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise MethodNotAllowed("CONNECT is not supported: the router is not a forward proxy.")
            return  # `_repeat_without_upgrade` follows
        if len(self.pipeline) >= MAX_AHEAD:
            raise MalformedRequest(f"More than {MAX_AHEAD} requests were sent ahead of their responses.")
        self._unread_bytes = 0
        version, named = parser.get_http_version(), first_values(headers)
        check_head(version, headers, named)
        path, target, fault = read_target(self.url)
        method = parser.get_method().decode("ascii")
        expects = b"expect" in named and version == "1.1"
        self.expect_100_continue = expects and named[b"expect"].lower() == b"100-continue"
        cors_headers = self._edge.cors.headers_for(named.get(b"origin")) if self._edge.cors else []
        received = ReceivedRequest(method, path, target, headers, named, self._host, cors_headers=cors_headers)
        if cors_headers and is_preflight(method, named):
            self._open(received, version == "1.0", answer_preflight)
        elif self._is_for_edge(received, fault):
            self._open(received, version == "1.0", self._edge.serve)
        else:
            self._pass_to_application(received)
        self.headers = []  # of trailers, which are dropped

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        cycle = self.cycle
        if not isinstance(cycle, Exchange):
            super().on_body(body)
            return
        cycle.add_body(body, self._limits.max_body_bytes)
        if self.pipeline and cycle.buffered_bytes > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unread_bytes, self._receiving, self._boundary_seen = 0, False, True
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.complete_request()
        else:
            super().on_message_complete()
            cycle.more_body = False  # uvicorn leaves it where the response was complete earlier
        if cycle.response_complete:
            self._drop_served()

    # --- exchanges ---

    def _is_for_edge(self, received: ReceivedRequest, fault: str) -> bool:
        """Whether a pod, or a refusal, answers the request. Sets its peer, and its tenant or refusal."""
        methods = self._edge.methods(received.path)
        if fault:
            received.refusal = MalformedRequest(fault)
        elif methods or received.path.startswith("/v1/"):
            self._admit(received, methods)
        return bool(methods) or received.refusal is not None

    def _admit(self, received: ReceivedRequest, methods: frozenset[str]) -> None:
        if b"x-forwarded-for" in received.named:
            received.peer = forwarded_for(self._host, received.headers, self._proxies)
        is_next = self.cycle is None or self.cycle.response_complete  # others begin when earlier requests have ended
        if methods:
            received.refusal = self._edge.refusal(received, methods, is_next=is_next)
        if received.refusal is not None:
            return
        admitted = self._served.gate.admit(received.path, received.named, time.time())
        if isinstance(admitted, RouterError):
            received.refusal = admitted
            return
        received.tenant = admitted
        if methods and is_next:
            received.refusal = self._edge.quota_refusal(received)

    def _open(self, received: ReceivedRequest, http_1_0: bool, serve: Serve) -> None:
        keep_alive = not http_1_0 and not self._served.is_stopping and self.parser.should_keep_alive()
        before = self.cycle
        exchange = Exchange(received, keep_alive, http_1_0, self.expect_100_continue, self._connection, serve)
        self.cycle = exchange
        if before is None or before.response_complete:
            self._serving = exchange
            exchange.take_turn()
        else:
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
            if self._served.is_stopping and isinstance(before, Exchange) and not before.started:
                before.keep_alive = True  # only the last pipelined response may end the connection
            if len(self.pipeline) >= MAX_PIPELINED:
                self.flow.pause_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Serve the next request of the pipeline."""
        if isinstance(cycle, Exchange):
            self._serving = cycle
            cycle.take_turn()
        else:
            super()._start_asgi_task(cycle, app)

    def _pass_to_application(self, received: ReceivedRequest) -> None:
        """Repeat this request's parser callbacks for uvicorn. The application finds the tenant in its state."""
        cors_headers = received.cors_headers
        url, headers, expects_100 = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects_100
        self.headers += headers
        super().on_headers_complete()
        self.scope["state"]["tenant"] = received.tenant
        self.cycle.keep_alive = self.cycle.keep_alive and not self._served.is_stopping
        if cors_headers:
            self.cycle.default_headers = [*self.cycle.default_headers, *cors_headers]
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()
