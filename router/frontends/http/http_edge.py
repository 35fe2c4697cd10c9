"""What `EdgeProtocol` requires of the listener that it serves.

`HttpEdge` forwards nothing: the listener's own application answers every request. `OpenAiEdge` and `AdminEdge` extend
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.admission.fair_bound import FairBound
from router.config.schema import Limits
from router.errors import BodyTooLarge, RouterError, status_of
from router.frontends.fair_turns import FairTurns
from router.frontends.http.client_deadlines import Newcomers
from router.frontends.http.cors import CorsPolicy
from router.frontends.http.exchange import STATUS_LINES, BodyMemory, ReceivedRequest
from router.frontends.http.relay import Downstream
from router.frontends.http.websockets import WebSocketClient
from router.request.error_responses import error_body, error_headers


class AnyExchange(Downstream, Protocol):
    """One request and its response: `Exchange` on a client's connection, or one that a gateway sends."""

    received: ReceivedRequest
    keep_alive: bool
    on_disconnect: Callable[[], None] | None

    @property
    def sends_events(self) -> bool:
        """Whether the response is an event stream, to which an error can be appended."""

    @property
    def response_complete(self) -> bool:
        """Whether the response has ended."""

    @property
    def http_1_0(self) -> bool:
        """Whether the client speaks HTTP/1.0."""


class HttpEdge:
    """The limits of a listener, and its responses to requests that it refuses before any application sees them."""

    own_bodies = True
    """Whether the listener's own application gets the bodies of requests."""

    def __init__(self, limits: Limits, methods: Callable[[str], frozenset[str]] = lambda _path: frozenset()) -> None:
        self.limits = limits
        self.methods = methods
        """The methods of a path whose requests become an `Exchange`; empty for other paths."""
        self.body_memory = BodyMemory(limits.max_held_bytes)
        self.response_turns = FairTurns()
        self.client_connections = places = FairBound(limits.max_connections, "connections", "limits.max_connections")
        self.newcomers = Newcomers(lambda: places.limit - places.used)
        self.cors: CorsPolicy | None = None
        self.websocket_paths: frozenset[str] = frozenset()

    def refusal(self, received: ReceivedRequest, methods: frozenset[str]) -> RouterError | None:
        """Why a request is refused before its key is checked; None if it is not."""
        declared = received.named.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limits.max_body_bytes:
            limit = f"{self.limits.max_body_bytes} bytes (limits.max_body_bytes)"
            return BodyTooLarge(f"The request body has {int(declared)} bytes, more than {limit}.")
        return None

    def tenant_refusal(self, received: ReceivedRequest) -> RouterError | None:
        """Why its tenant's share or quota refuses a request before its body is read; None if it does not."""
        return None

    async def serve(self, client: AnyExchange) -> None:
        """Answer a refused request, and close the connection without reading the rest of it."""
        assert client.received.refusal is not None
        client.keep_alive = False
        send_error(client, client.received.refusal)

    def abandoned(self, received: ReceivedRequest) -> None:
        """Called when a client disconnects before its request is served."""

    def standalone_error(self, error: RouterError) -> bytes:
        """The whole response to a request that cannot be parsed; it closes the connection."""
        return whole_error(error)

    async def serve_websocket(self, received: ReceivedRequest, client: WebSocketClient) -> None:
        raise NotImplementedError


def whole_error(error: Exception, *, names_pods: bool = True) -> bytes:
    """A whole response, after which the connection is closed."""
    body = error_body(error, names_pods=names_pods)
    headers = [b"%b: %b\r\n" % pair for pair in error_headers(error, body)]
    status_line = STATUS_LINES[status_of(error)]
    return b"".join([status_line, b"\r\n", *headers, b"connection: close\r\n\r\n", body])


def send_error(client: AnyExchange, error: Exception, *more: tuple[bytes, bytes], names_pods: bool = True) -> None:
    """Answer with the error object of the API that was called, and `more` headers."""
    body = error_body(error, client.received.path, names_pods=names_pods)
    client.start(status_of(error), [*error_headers(error, body), *more])
    client.put(body)
    client.finish()
