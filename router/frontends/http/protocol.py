"""Parses a client's connection with httptools, and serves its requests one after the other.

Each request becomes an `Exchange`, which the edge or the listener's own application serves. uvicorn accepts the
connections and stops them; it calls `shutdown`. This module decodes no body.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from time import time
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn import Config
from uvicorn.server import ServerState

from router.admission.tenant import Admitted
from router.errors import BodyTooLarge, MalformedRequest, MethodNotAllowed, RouterError
from router.frontends.http.client_deadlines import ClientDeadlines, has_unread
from router.frontends.http.exchange import (
    MAX_COMPARED,
    PROGRESS_BYTES,
    SLOW_REQUEST_S,
    ClientConnection,
    Exchange,
    Serve,
)
from router.frontends.http.request_head import (
    answer_preflight,
    check_head,
    client_network,
    forwarded_for,
    head_without_upgrade,
    host_in,
    is_preflight,
    parse_refusal,
    read_target,
    trusted_proxies,
)
from router.request.error_responses import headers_too_large, late_request, too_many_headers
from router.request.inbound import Head, HeaderList, first_values

if TYPE_CHECKING:
    from router.frontends.http.http_edge import HttpEdge

LINGER_S = 0.2
"""When the server stops, a connection is closed after being idle for this time."""
DROPPED_BYTES = 64 * 1024 * 1024
"""What such a client may send before its connection is closed."""
MAX_PIPELINED = 4
"""Requests that a client may send ahead of their responses. The connection is read until then, because a disconnect is
noticed only while reading."""

PIPELINED_BYTES = 64 * 1024
"""Bytes of the body of a request that waits for an earlier response, above which the connection is not read."""
MAX_AHEAD = 64
"""Requests that are accepted ahead of their responses where they arrive in one piece. 9,000 small requests fit into a
piece and would block the event loop for 100 ms."""


class EdgeProtocol(ClientConnection):
    """One client's connection to an `HttpEdge`. Passed to uvicorn as `http`, which calls the constructor."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.edge = edge = cast("HttpEdge", config.app)
        self.body_memory, self.turns = edge.body_memory, edge.response_turns
        allowed = config.forwarded_allow_ips
        self._limits = edge.limits
        self._max_headers = self._limits.max_headers
        self._proxies = trusted_proxies(",".join(allowed) if isinstance(allowed, list) else allowed)
        self._state = server_state
        self.tasks = server_state.tasks
        self.loop = _loop or asyncio.get_running_loop()
        self._keep_alive_s = config.timeout_keep_alive
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.headers: HeaderList = []
        self.last: Exchange | None = None
        self._serving: Exchange | None = None
        """The exchange that is served or was served last; later ones wait in the pipeline."""
        self.pipeline: deque[Exchange] = deque()
        self._receiving = False
        self._boundary_seen = False
        """Whether the bytes being parsed begin or end a request."""
        self._unread_bytes = 0
        """Bytes since the last complete part of a request; bounds headers that do not end."""
        self._dropped_bytes = 0
        self._progress_bytes = PROGRESS_BYTES
        """Size of the body at which its client has more time for the rest."""
        self._is_lost = self._rejected = False
        """`_rejected`: whether further bytes of this client are ignored."""
        self._host = ""
        """Address of the client, or of a proxy; empty for a Unix socket."""
        self._network = ""
        self._owner: str | None = None
        """Whose share of the connections it uses; None until a request is admitted: it is one of the newcomers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)
        connections = self._state.connections
        connections.add(cast(Any, self))
        self._host = host_in(transport.get_extra_info("peername"))
        self._network = client_network(self._host, self._proxies)
        self._deadlines = ClientDeadlines(self.loop, transport, self._limits, self._keep_alive_s, self._too_late)
        self._set_deadline()
        self.edge.newcomers.add(self._leave, self._network)

    @property
    def waits_for_head(self) -> bool:
        """Whether no request is being received or served, except for the start of a head, and no response sent."""
        transport, is_answered = self.transport, self.last is None or self.last.response_complete
        return is_answered and (transport.is_closing() or not self._rejected) and not transport.get_write_buffer_size()

    @property
    def is_incomplete(self) -> bool:
        """Whether the rest of a request is missing, no response to it has begun, and no earlier one is served."""
        last, is_ending = self.last, self._rejected or self.transport.is_closing()
        return self._receiving and not (self.pipeline or is_ending or last is None or last.started)

    def _take_place(self, owner: str, weight: float) -> RouterError | None:
        """Count it among those of this owner. Returns why there is no place. A connection that has one keeps it."""
        places = self.edge.client_connections
        if self._owner is None and not (places.has_room(owner, weight, 1) or self._displace(owner, weight)):
            return places.refusal(owner, weight)
        self._give_back_place()
        self.edge.newcomers.networks.pop(self._leave, None)
        places.add(owner, weight, 1)
        self._owner = owner
        return None

    def _displace(self, owner: str, weight: float) -> bool:
        """Take the place of the connection, of the owner with the most for its weight, that has waited longest for the
        head of a request, or else for the rest. Returns whether there is one among the first `MAX_COMPARED`."""
        places, slow_s, waiting = self.edge.client_connections, self.loop.time() - SLOW_REQUEST_S, []
        for other in cast(list[EdgeProtocol], islice(self._state.connections, MAX_COMPARED)):
            if (of := other._owner) is None or not ((is_idle := other.waits_for_head) or other.is_incomplete):
                continue
            since_s = other._deadlines.waiting_since_s
            if places.must_yield(of, owner, weight, 1, is_slow=is_idle or since_s < slow_s):
                waiting.append(((places.part(of), is_idle, -since_s), other))
        if waiting:
            max(waiting, key=itemgetter(0))[1]._lose_place()
        return bool(waiting)

    def _lose_place(self) -> None:
        """End for another connection, after an error response to a request that is incomplete."""
        last, owner = self.last, self._owner or ""
        self._give_back_place()
        if last is None or self.waits_for_head:
            self.transport.abort()
        else:
            self._reject_client(self.edge.client_connections.refusal(owner, last.admitted.tenant.weight))

    def _give_back_place(self) -> None:
        if self._owner is not None:
            self.edge.client_connections.give_back(self._owner, 1)
            self.edge.newcomers.add(self._leave, self._network)
            self._owner = None

    def _leave(self) -> bool:
        """End without a place. Returns False if bytes of a first request wait to be read."""
        transport, has_begun = self.transport, self.last is not None or self._rejected
        if not (has_begun or transport.is_closing()) and has_unread(transport.get_extra_info("socket").fileno()):
            return False
        transport.abort()  # `close` would wait for the client, where TLS is used
        return True

    def data_received(self, data: bytes) -> None:
        if self._rejected:
            self._drop(len(data))
            return
        self._unread_bytes += len(data)
        parsed = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            parsed = upgrade.args[0]
        except httptools.HttpParserError as error:
            self._reject_client(parse_refusal(error))
        if parsed:
            self._feed_again(memoryview(data)[parsed:])
        if self._boundary_seen and not self._rejected:
            self._boundary_seen = False
            self._set_deadline()
        if self._unread_bytes > self._limits.max_header_bytes and not self._rejected:
            self._reject_client(headers_too_large(self._limits))

    def _feed_again(self, rest: memoryview) -> None:
        """Parse a head with an Upgrade header again without it, as if the client had not sent it (RFC 9110 7.8), and
        the rest. httptools does not parse the body of a request to upgrade: it would become the next request."""
        while True:
            method, version = self.parser.get_method(), self.parser.get_http_version()
            self.parser = httptools.HttpRequestParser(self)
            try:
                self.parser.feed_data(head_without_upgrade(method, self.url, version, self.headers))
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._reject_client(parse_refusal(error))
                return

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadlines.await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadlines.drained()

    def response_complete(self) -> None:
        """Begin the next request of the pipeline, or wait for one."""
        if self._is_lost:
            return
        self._state.total_requests += 1
        if self.transport.is_closing():
            self._deadlines.await_reading()
            return
        if self.read_paused:
            self.resume_reading()
        if self._rejected and not self.pipeline:
            self._end_connection()
            return
        if self.pipeline:
            self._serving = self.pipeline.popleft()
            self._serving.take_turn()
        self._drop_served()
        self._set_deadline()
        if self.last is not None and self.last.response_complete:  # its client is still sending
            self._give_back_place()

    def _drop_served(self) -> None:
        """Free the last request, if it is complete and so is its response: an idle connection keeps none."""
        last = self.last
        if last is not None and last.response_complete and not last.more_body:
            self.last = self._serving = None

    def _set_deadline(self) -> None:
        last = self.last
        if last is not None and not last.response_complete and (self.pipeline or not last.more_body):
            self._deadlines.disarm()
        elif self._receiving:
            self._deadlines.await_rest_of_request()
        else:
            self._deadlines.await_request()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops. The next response to begin closes the connection; an idle connection
        is closed after `LINGER_S`."""
        if self.last is not None and not self.last.started:
            self.last.keep_alive = False
        self._deadlines.shorten(LINGER_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._give_back_place()
        self.edge.newcomers.networks.pop(self._leave, None)
        super().resume_writing()
        self._deadlines.end()
        if self._serving is not None:
            self._serving.disconnect()
        for exchange in dict.fromkeys((self._serving, self.last, *self.pipeline)):
            if exchange is not None and not exchange.began:
                self.body_memory.release(exchange)
                if exchange.serve == self.edge.serve:
                    self.edge.abandoned(exchange)
        self._is_lost = True
        self.last = self._serving = None  # breaks a reference cycle
        self.pipeline.clear()
        del self.parser  # another one

    # --- rejected clients ---

    def _too_late(self) -> None:
        self._reject_client(late_request(self._limits))

    def _reject_client(self, error: RouterError) -> None:
        """Stop reading from this client. Requests that were received are answered, then the connection is closed."""
        self._rejected = True
        last = self.last
        if last is not None and not last.response_complete:
            last.keep_alive = False
            if last.more_body:
                last.refuse(error)
            return
        if last is None or not last.more_body:
            self.transport.write(self.edge.standalone_error(error))
        self._end_connection()

    def _end_connection(self) -> None:
        """Close the connection when its client has read what was written."""
        if not self._receiving:
            self.transport.close()
            self._deadlines.await_reading()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._give_back_place()  # a close would reset the connection before its client has read the response
        self._deadlines.shorten(SLOW_REQUEST_S)
        self._deadlines.await_request()

    def _drop(self, size_bytes: int) -> None:
        self._dropped_bytes += size_bytes
        if self._dropped_bytes > DROPPED_BYTES:
            self.transport.close()

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._receiving = self._boundary_seen = True
        self.url = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self.headers
        headers.append((name.lower(), value))
        if len(headers) > self._max_headers:
            raise too_many_headers(self._limits)

    def on_headers_complete(self) -> None:
        parser, headers = self.parser, self.headers
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise MethodNotAllowed("CONNECT is not supported: the router is not a forward proxy.", ())
            return  # `_feed` parses the head again
        if len(self.pipeline) >= MAX_AHEAD:
            raise MalformedRequest(f"More than {MAX_AHEAD} requests were sent ahead of their responses.")
        self._unread_bytes, self._dropped_bytes, self._progress_bytes = 0, 0, PROGRESS_BYTES
        edge, version = self.edge, parser.get_http_version()
        head = self._head(version, first_values(headers))
        cors_headers = edge.cors.headers_for(head.named.get(b"origin")) if edge.cors else []
        admitted, refusal, waits_for_body = Admitted(head.network), None, True
        if cors_headers and is_preflight(head.method, head.named):
            serve: Serve = answer_preflight
        else:
            admitted, refusal = self._admit(head)
            serve = edge.serve
            if refusal is None and not head.methods:
                serve, waits_for_body = edge.serve_own, edge.own_bodies
        is_1_0 = version == "1.0"
        ends = is_1_0 or edge.is_stopping or isinstance(refusal, BodyTooLarge)
        keep_alive = not ends and parser.should_keep_alive()
        self._open(Exchange(head, admitted, refusal, keep_alive, is_1_0, self, serve, waits_for_body, cors_headers))
        self.headers = []  # of trailers, which are dropped

    def _head(self, version: str, named: Mapping[bytes, bytes]) -> Head:
        """The head that was parsed. Raises `MalformedRequest` where it is ambiguous."""
        edge, headers, peer, network = self.edge, self.headers, self._host, self._network
        check_head(version, headers, named)
        path, target, fault = read_target(self.url)
        if b"x-forwarded-for" in named:
            peer = forwarded_for(peer, headers, self._proxies)
            network = client_network(peer, self._proxies)
        request_id, given_id, trace = edge.identity(headers, named)
        return Head(
            id=request_id,
            method=self.parser.get_method().decode("ascii"),
            target=target,
            headers=headers,
            path=path,
            named=named,
            methods=edge.methods(path),
            fault=fault,
            peer=peer,
            network=network,
            given_id=given_id,
            trace=trace,
        )

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        assert self.last is not None
        self.last.add_body(body, self._limits.max_body_bytes)
        if not self.last.buffered_bytes:
            self._drop(len(body))
        elif self.last.buffered_bytes >= self._progress_bytes:
            self._progress_bytes += PROGRESS_BYTES
            self._set_deadline()
        if self.pipeline and self.last.buffered_bytes > PIPELINED_BYTES:
            self.pause_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unread_bytes, self._receiving, self._boundary_seen = 0, False, True
        assert self.last is not None
        self.last.complete_request()
        self._drop_served()

    # --- exchanges ---

    def _admit(self, head: Head) -> tuple[Admitted, RouterError | None]:
        """For whom a request comes, and why it is refused; None if it is not, and then its connection has a place."""
        is_next = self.last is None or self.last.response_complete
        admitted, refusal = self.edge.admit(head, time(), is_next=is_next)
        is_others = admitted.owner != self._owner and (self._owner is None or head.needs_key)
        if refusal is None and is_others:
            refusal = self._take_place(admitted.owner, admitted.tenant.weight)
        return admitted, refusal

    def _open(self, exchange: Exchange) -> None:
        before, self.last = self.last, exchange
        if before is None or before.response_complete:
            self._serving = exchange
            exchange.take_turn()
            return
        self.pipeline.append(exchange)
        if self.edge.is_stopping and not before.started:
            before.keep_alive = True  # only the last pipelined response may end the connection
        if len(self.pipeline) >= MAX_PIPELINED:
            self.pause_reading()
