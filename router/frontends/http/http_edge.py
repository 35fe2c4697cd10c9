"""One listener: which requests it admits, and how it answers those that no pod answers.

`HttpEdge` forwards nothing: its own application answers every request. `OpenAiEdge` and `AdminEdge` extend it.
"""

from __future__ import annotations

import asyncio
import re
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from itertools import chain
from time import time
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

import structlog

from router.admission.fair_bound import FairBound, body_memory
from router.admission.tenant import Admitted
from router.errors import BodyTooLarge, MalformedRequest, RouterError, UnsupportedEncoding, status_of
from router.frontends.fair_turns import FairTurns
from router.frontends.http.client_deadlines import Newcomers
from router.frontends.http.exchange import STATUS_LINES, BodyHolder, BodyMemory, date_line
from router.frontends.http.request_head import CorsPolicy, page_refusal
from router.request.effects import Downstream
from router.request.error_responses import error_body, error_headers, headers_too_large
from router.request.inbound import Head, HeaderList, Trace

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from router.config.schema import Limits

_MARKED_OBJECT = re.compile(BOM_UTF8 + rb"\s{0,64}\{")
_ENCODINGS = frozenset({b"", b"identity", b"gzip", b"x-gzip", b"zstd"})
UNPACKED_INLINE_BYTES = 256 * 1024
"""Unpacked in a millisecond."""
_WINDOW = {int(zstd.DecompressionParameter.window_log_max): 23}

log = structlog.get_logger()


class AnyExchange(Downstream, BodyHolder, Protocol):
    """One request and its response: `Exchange` on a client's connection, or one that a gateway sends."""

    head: Head
    refusal: RouterError | None
    body: bytes
    is_plain: bool
    keep_alive: bool
    kept_open: bool

    @property
    def sees_response(self) -> bool:
        """Whether the response passes the router."""

    @property
    def sends_events(self) -> bool:
        """Whether the response is an event stream, to which an error can be appended."""

    @property
    def response_complete(self) -> bool:
        """Whether the response has ended."""

    @property
    def http_1_0(self) -> bool:
        """Whether the client speaks HTTP/1.0."""

    def outlives_client(self) -> asyncio.Event:
        """Serve the request to its end also when its client disconnects: then the event is set."""


class HttpEdge:
    """The limits of a listener and its application, which `own` is. uvicorn takes it for the application itself."""

    own_bodies = True
    """Whether the listener's own application gets the bodies of requests."""

    def __init__(self, limits: Limits, own: ASGIApp, memory: FairBound | None = None) -> None:
        self.limits = limits
        self._own = own
        self.methods: Callable[[str], frozenset[str]] = lambda _path: frozenset()
        """The methods of a path that is forwarded to pods; empty for other paths."""
        self.is_stopping = False
        """Each response closes its connection, so that the client reconnects to another router; `/readyz` fails."""
        self.body_memory = BodyMemory(memory or body_memory(limits.max_held_bytes))
        self._unpacking = FairTurns()
        self.response_turns = FairTurns()
        self.client_connections = places = FairBound(limits.max_connections, "connections", "limits.max_connections")
        self.newcomers = Newcomers(lambda: places.limit - places.used)
        self.cors: CorsPolicy | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # the server sends no body
        await self._own(scope, receive, send)

    # --- admission ---

    def identity(self, headers: HeaderList, named: Mapping[bytes, bytes]) -> tuple[str, str, Trace | None]:
        """The id of a request with these headers, its client's own where that was replaced, and its trace."""
        return "", "", None

    def admit(self, head: Head, now_s: float, *, is_next: bool = True) -> tuple[Admitted, RouterError | None]:
        """For whom a request comes, and why it is refused by its head alone; None if it is not. `now_s`: Unix time.
        `is_next`: whether it begins now, because no earlier request of its connection is being served."""
        return Admitted(head.network), self.fault(head)

    def fault(self, head: Head) -> RouterError | None:
        """Why nobody's request may have this head; None if it is well."""
        named, limits = head.named, self.limits
        if head.fault:
            return MalformedRequest(head.fault)
        if sum(map(len, chain.from_iterable(head.headers))) > limits.max_header_bytes:
            return headers_too_large(limits)
        declared = named.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limits.max_body_bytes:
            limit = f"{limits.max_body_bytes} bytes (limits.max_body_bytes)"
            return BodyTooLarge(f"The request body has {int(declared)} bytes, more than {limit}.")
        if b"content-encoding" in named and not is_accepted(head.headers):
            return UnsupportedEncoding("Send the request body plain, or with `content-encoding: gzip` or `zstd`.")
        if len(named) != len(head.headers) and sum(name == b"content-type" for name, _ in head.headers) > 1:
            return MalformedRequest("There are several Content-Type headers; send one.")
        return page_refusal(head.method, named, self.cors) if b"origin" in named else None

    # --- requests that no pod answers ---

    async def serve(self, client: AnyExchange) -> None:
        """Answer a refused request, and close the connection."""
        assert client.refusal is not None
        client.keep_alive = False
        send_error(client, client.refusal)

    async def serve_own(self, client: AnyExchange) -> None:
        """Answer a request that is not forwarded, unless it was refused meanwhile."""
        try:
            await self.make_plain(client)
        except MalformedRequest as error:
            client.refusal = error
        await (self.serve(client) if client.refusal else serve_with(self, client))

    def abandoned(self, client: AnyExchange) -> None:
        """Called when a client disconnects before its request is served."""

    def standalone_error(self, error: RouterError) -> bytes:
        """The whole response to a request that cannot be parsed; it closes the connection."""
        body = error_body(error)
        headers = [b"%b: %b\r\n" % pair for pair in error_headers(error, body)]
        first = STATUS_LINES[status_of(error)], b"\r\n", date_line(int(time())), b"\r\n"
        return b"".join([*first, *headers, b"connection: close\r\n\r\n", body])

    # --- encoded bodies ---

    async def make_plain(self, client: AnyExchange) -> None:
        """Unpack the body of a request, and remove the byte order mark of a JSON object. Raises `MalformedRequest`.
        Where the plain body finds no memory, the request is refused."""
        encoding = client.head.named.get(b"content-encoding", b"").lower()
        if encoding not in (b"", b"identity") and client.body and client.refusal is None and not client.is_plain:
            client.is_plain = True
            await self._unpack(client, encoding)
        if _MARKED_OBJECT.match(client.body):
            client.body = await asyncio.to_thread(b"".join, [memoryview(client.body)[len(BOM_UTF8) :]])

    async def _unpack(self, client: AnyExchange, encoding: bytes) -> None:
        """A short body is unpacked in the event loop, others in a thread, one at a time."""
        body, max_bytes, plain = client.body, self.limits.max_body_bytes, None
        if len(body) <= UNPACKED_INLINE_BYTES:
            plain = unpack(body, encoding, UNPACKED_INLINE_BYTES)
        if plain is None or len(plain) > UNPACKED_INLINE_BYTES:
            tenant, arguments = client.admitted.tenant, (body, encoding, max_bytes)
            plain = await self._unpacking.run(tenant, body, unpack, *arguments, inline_bytes=0)
        more_bytes = max(len(plain) - len(body), 0)
        is_held = self.body_memory.take(client, more_bytes, max_bytes, asyncio.get_running_loop().time())
        client.body = plain if is_held else b""


def send_error(client: AnyExchange, error: Exception, *more: tuple[bytes, bytes], names_pods: bool = True) -> None:
    """Answer with the error object of the API that was called, and `more` headers."""
    body = error_body(error, client.head.path, names_pods=names_pods)
    client.start(status_of(error), [*error_headers(error, body), *more])
    client.put(body)
    client.finish()


def is_accepted(headers: HeaderList) -> bool:
    """Whether a body with these headers can be unpacked: it is encoded once at most."""
    return b",".join([value for name, value in headers if name == b"content-encoding"]).lower() in _ENCODINGS


def unpack(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """The body; of one with more than `max_bytes`, as many and one more. Raises `MalformedRequest`."""
    decoder = zstd.ZstdDecompressor(options=_WINDOW) if encoding == b"zstd" else zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        plain = decoder.decompress(body, max_bytes + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise MalformedRequest(f"The request body is not valid {encoding.decode()}: {error}") from error
    if len(plain) <= max_bytes and (not decoder.eof or decoder.unused_data):
        raise MalformedRequest(f"The request body is not one whole {encoding.decode()} stream.")
    return plain


async def serve_with(app: ASGIApp, client: AnyExchange) -> None:
    """Answer with `app`. It is not cancelled when the client disconnects, so that an operator's command is carried out
    completely; it gets the message `http.disconnect`."""
    head, gone, body = client.head, client.outlives_client(), [client.body]
    path, _, query = head.target.partition(b"?")
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if client.http_1_0 else "1.1",
        "method": head.method,
        "scheme": "http",
        "path": unquote(head.path),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": head.headers,
        "state": {"tenant": client.admitted.tenant},
    }

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if client.disconnected:
            return
        if message["type"] == "http.response.start":
            client.start(message["status"], message["headers"])
            return
        if (piece := message.get("body")) and not client.put(piece):
            await client.ready()
        if not message.get("more_body"):
            client.finish()

    try:
        await app(scope, receive, send)
    except Exception:  # the application has answered
        log.exception("request failed", path=head.path)
