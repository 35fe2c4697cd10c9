"""What `EdgeProtocol` requires of the listener that it serves.

`HttpEdge` forwards nothing: the listener's own application answers every request. `OpenAiEdge` and `AdminEdge` extend
it.
"""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Callable
from time import time
from typing import Protocol

from router.admission.fair_bound import FairBound
from router.config.schema import Limits
from router.errors import BodyTooLarge, MalformedRequest, RouterError, UnsupportedEncoding, status_of
from router.frontends.fair_turns import FairTurns
from router.frontends.http.client_deadlines import Newcomers
from router.frontends.http.cors import CorsPolicy, page_refusal
from router.frontends.http.encoded_bodies import UNPACKED_INLINE_BYTES, is_accepted, unpack
from router.frontends.http.exchange import STATUS_LINES, BodyHolder, BodyMemory, ReceivedRequest, date_line
from router.request.effects import Downstream
from router.request.error_responses import error_body, error_headers

_MARKED_OBJECT = re.compile(BOM_UTF8 + rb"\s{0,64}\{")


class AnyExchange(Downstream, BodyHolder, Protocol):
    """One request and its response: `Exchange` on a client's connection, or one that a gateway sends."""

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
        self._unpacking = FairTurns()
        self.response_turns = FairTurns()
        self.client_connections = places = FairBound(limits.max_connections, "connections", "limits.max_connections")
        self.newcomers = Newcomers(lambda: places.limit - places.used)
        self.cors: CorsPolicy | None = None

    def refusal(self, received: ReceivedRequest, methods: frozenset[str]) -> RouterError | None:
        """Why a request is refused before its key is checked; None if it is not."""
        declared = received.named.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limits.max_body_bytes:
            limit = f"{self.limits.max_body_bytes} bytes (limits.max_body_bytes)"
            return BodyTooLarge(f"The request body has {int(declared)} bytes, more than {limit}.")
        if b"content-encoding" in received.named and not is_accepted(received.headers):
            return UnsupportedEncoding("Send the request body plain, or with `content-encoding: gzip` or `zstd`.")
        return page_refusal(received.method, received.named, self.cors) if b"origin" in received.named else None

    async def make_plain(self, client: AnyExchange) -> None:
        """Unpack the body of a request, and remove the byte order mark of a JSON object; or refuse the request."""
        received = client.received
        encoding = received.named.get(b"content-encoding", b"").lower()
        if encoding not in (b"", b"identity") and received.body and received.refusal is None:
            try:
                await self._unpack(client, encoding)
            except MalformedRequest as error:
                received.refusal = error
        if _MARKED_OBJECT.match(received.body):
            received.body = await asyncio.to_thread(b"".join, [memoryview(received.body)[len(BOM_UTF8) :]])

    async def _unpack(self, client: AnyExchange, encoding: bytes) -> None:
        """A short body is unpacked in the event loop, others in a thread, one at a time."""
        received, max_bytes, plain = client.received, self.limits.max_body_bytes, None
        body, received.named = received.body, {**received.named, b"content-encoding": b""}
        if len(body) <= UNPACKED_INLINE_BYTES:
            plain = unpack(body, encoding, UNPACKED_INLINE_BYTES)
        if plain is None or len(plain) > UNPACKED_INLINE_BYTES:
            async with self._unpacking.turn(received.tenant, len(body), len(body)):
                plain = await asyncio.to_thread(unpack, body, encoding, max_bytes)
        more_bytes = max(len(plain) - len(body), 0)
        is_held = self.body_memory.take(client, more_bytes, max_bytes, asyncio.get_running_loop().time())
        received.body = plain if is_held else b""

    def tenant_refusal(self, received: ReceivedRequest) -> RouterError | None:
        """Why its tenant's share or quota refuses a request before its body is read; None if it does not."""
        return None

    async def serve(self, client: AnyExchange) -> None:
        """Answer a refused request, and close the connection."""
        assert client.received.refusal is not None
        client.keep_alive = False
        send_error(client, client.received.refusal)

    def abandoned(self, received: ReceivedRequest) -> None:
        """Called when a client disconnects before its request is served."""

    def standalone_error(self, error: RouterError) -> bytes:
        """The whole response to a request that cannot be parsed; it closes the connection."""
        body = error_body(error)
        headers = [b"%b: %b\r\n" % pair for pair in error_headers(error, body)]
        first = STATUS_LINES[status_of(error)], b"\r\n", date_line(int(time())), b"\r\n"
        return b"".join([*first, *headers, b"connection: close\r\n\r\n", body])


def send_error(client: AnyExchange, error: Exception, *more: tuple[bytes, bytes], names_pods: bool = True) -> None:
    """Answer with the error object of the API that was called, and `more` headers."""
    body = error_body(error, client.received.path, names_pods=names_pods)
    client.start(status_of(error), [*error_headers(error, body), *more])
    client.put(body)
    client.finish()
