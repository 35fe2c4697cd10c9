"""One HTTP request about which a gateway asks: the messages of one gRPC stream, for Envoy's filter `ext_proc`.

Reads the request from them, within the limits of the configuration, and writes the pick, or an answer of the router's
own. Decides nothing. Envoy sends bodies in one of two modes (`unsupported`), and may repeat the end of a body: what
follows it is ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
import httptools
import structlog
from google.protobuf.message import DecodeError

from router.admission.tenant import OPEN_TENANT, Admitted, Tenant
from router.errors import MalformedRequest, RouterError, Stopping
from router.frontends.extproc.messages import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    OVERWRITE,
    ProcessingRequest,
    ProcessingResponse,
    bytes_besides_body,
)
from router.frontends.extproc.metadata import (
    MODEL_HEADER,
    OBJECTIVE_HEADER,
    POD_HEADER,
    addresses_in,
    host_of,
    peer_in,
    translated,
)
from router.frontends.fair_turns import FairTurns
from router.frontends.http.exchange import PROGRESS_BYTES
from router.frontends.http.http_edge import HttpEdge, send_error
from router.frontends.http.request_head import client_network, forwarded_for, read_target, trusted_proxies
from router.guards import Bound, OutOfBounds
from router.request.error_responses import late_request, too_many_headers
from router.request.inbound import EVENT_STREAM, Head, HeaderList, first_values, media_type
from router.request.reading import with_field

log = structlog.get_logger()
_turns = FairTurns()

CHUNK_BYTES = 62_000
"""Envoy takes at most 64 KiB in one message."""
METADATA_BYTES = 256 * 1024
"""What a message may have in addition to headers and a body: metadata and attributes."""
MAX_PSEUDO_HEADERS = 8
_TEST_HEADER = b"test-epp-endpoint-selection"


class Modes(NamedTuple):
    """How Envoy sends bodies; see `ProtocolConfig`."""

    request: int = FULL_DUPLEX_STREAMED
    response: int = FULL_DUPLEX_STREAMED


class GatewayTerms(NamedTuple):
    """What all requests of gateways have in common. `aliases`: see `translated`. `priority`: see `PickerServer`."""

    edge: HttpEdge
    aliases: Mapping[bytes, bytes]
    priority: Callable[[bytes], int]
    trusts_test_header: bool = False


def unsupported(modes: Modes, *, answers: bool) -> str:
    """Why the picker cannot serve a filter with these modes; "" if it can. `answers`: by itself."""
    if answers and modes.request != FULL_DUPLEX_STREAMED:
        return "set processing_mode.request_body_mode to FULL_DUPLEX_STREAMED, or picker.requests to gateway"
    if modes.request not in (FULL_DUPLEX_STREAMED, BUFFERED):
        return "set processing_mode.request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED"
    if modes.response not in (FULL_DUPLEX_STREAMED, NONE):
        return "set processing_mode.response_body_mode to FULL_DUPLEX_STREAMED or NONE: others hold back streams"
    return ""


class GatewayExchange:
    """One request and its response, as `OpenAiEdge` and `PickForwarder` serve it (`AnyExchange`)."""

    http_1_0 = sends_events = was_slow = kept_open = False
    keep_alive = True
    answers = False
    """Whether the picker sends the request to a pod itself."""

    def __init__(self, call: Any, terms: GatewayTerms) -> None:
        self._call = call
        self._terms = terms
        self._edge = edge = terms.edge
        self._memory, self._limits = edge.body_memory, edge.limits
        self._bound = Bound("message of a gateway besides its body", self._limits.max_header_bytes + METADATA_BYTES)
        self._task = asyncio.current_task()
        self.modes = Modes()
        self.admitted = Admitted()
        self.refusal: RouterError | None = None
        self.body = b""
        self.is_plain = False
        self.has_body = False
        self.buffered_bytes = 0
        self.arrived_s = 0.0
        self.is_stopping = False
        """Whether the picker ends the stream, and not the gateway."""
        self.was_reset = False
        self.is_picked = self.is_rewritten = False
        """`is_rewritten`: whether `body` is not the client's."""
        self.response_complete = False
        self.pick_limit: asyncio.Timeout | None = None
        """Until when a pod must be named."""
        self.pieces: list[bytes] = []
        self._has_trailers = False
        self._answer: Any = None

    # --- the stream ---

    async def read(self) -> Any | None:
        """The next message; None when the gateway has closed the stream."""
        data = await self._call.read()
        if data is grpc.aio.EOF:
            return None
        try:
            self._bound.check_size(bytes_besides_body(data))
            return ProcessingRequest.FromString(data)
        except DecodeError:
            await self._call.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a message of envoy.service.ext_proc.v3")
            raise
        except OutOfBounds as error:
            await self._call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"warmroute picker: {error}")
            raise

    async def read_response(self) -> Any | None:
        """The next message about the response; None when the gateway has closed or reset the stream, which it also
        does at the end of a response."""
        try:
            return await self.read()
        except asyncio.CancelledError:
            if not self.disconnected:
                raise
            self.was_reset = True
            return None

    async def write(self, message: Any) -> None:
        await self._call.write(message.SerializeToString())

    async def serve(self) -> None:
        """Serve the request of the stream to its end. Cancelled when the gateway resets the stream."""
        first = await self.read()
        if first is None:
            return
        if first.HasField("protocol_config"):  # Envoy below 1.32 does not send it
            self.modes = Modes(first.protocol_config.request_body_mode, first.protocol_config.response_body_mode)
        if why := unsupported(self.modes, answers=self.answers):
            log.warning("refused a gateway", why=why)
            await self._call.abort(grpc.StatusCode.FAILED_PRECONDITION, f"warmroute picker: {why}")
        if not first.HasField("request_headers"):
            why = "set processing_mode.request_header_mode to SEND"
            await self._call.abort(grpc.StatusCode.FAILED_PRECONDITION, f"warmroute picker: {why}")
        self._read_head(first)
        try:
            if self.has_body and self.refusal is None and not await self._read_body():
                self._edge.abandoned(self)
                return
            await (self._edge.serve(self) if self.head.methods else self._edge.serve_own(self))
        finally:
            self._memory.release(self)
        await self.end()

    async def stop(self) -> None:
        """The picker ends. A request that has no pod yet is refused: without a word, the gateway would let it pass."""
        if not self.started:
            send_error(self, Stopping("The picker is stopping; send the request again."))
        await self.end()

    async def end(self) -> None:
        """Send the router's own answer, if it has one; else read what Envoy still sends until it ends the stream."""
        if self._answer is not None:
            await self.write(ProcessingResponse(immediate_response=self._answer))
            return
        if self.was_reset or not self.response_complete:
            return
        while await self.read() is not None:
            pass  # a repeated end of a body

    # --- the request ---

    def _read_head(self, message: Any) -> None:
        """Read the headers, and see whether the request is admitted."""
        edge, limits = self._edge, self._limits
        given, room = message.request_headers.headers.headers, limits.max_headers + MAX_PSEUDO_HEADERS
        pseudo, headers = _split(given[:room])
        self.has_body = not message.request_headers.end_of_stream
        headers = translated(headers, self._terms.aliases)
        named = first_values(headers)
        try:
            path, target, fault = read_target(pseudo.get(b":path", b""))
        except httptools.HttpParserError:
            path, target, fault = "/", b"/", "Invalid HTTP request: its target is no path or URL."
        if b"upgrade" in named:
            fault = "Connections cannot be upgraded, and websockets are not routed: send no Upgrade header."
        gateway = host_of(unquote(self._call.peer().partition(":")[2]))  # ipv6:%5B::1%5D:4711
        proxies = trusted_proxies(gateway)
        peer, allowed = peer_in(message) or forwarded_for(gateway, headers, proxies), addresses_in(message)
        if self._terms.trusts_test_header and (forced := named.get(_TEST_HEADER)):
            allowed = frozenset(forced.decode("latin-1").replace(" ", "").split(","))
        request_id, given_id, trace = edge.identity(headers, named)
        self.head = head = Head(
            id=request_id,
            method=pseudo.get(b":method", b"").decode("latin-1"),
            target=target,
            headers=headers,
            path=path,
            named=named,
            methods=edge.methods(path),
            fault=fault,
            peer=peer,
            network=client_network(peer, proxies),
            given_id=given_id,
            trace=trace,
            pods_allowed=allowed,
        )
        self.sees_response = self.answers or self.modes.response != NONE
        if len(given) > room or len(headers) > limits.max_headers:
            self.refusal = too_many_headers(limits)
            return
        self.admitted, self.refusal = edge.admit(head, time.time())
        if (objective := named.get(OBJECTIVE_HEADER)) and self.admitted.tenant is OPEN_TENANT:
            tenant = _open_tenant(self._terms.priority(objective))
            self.admitted = Admitted(self.admitted.owner, tenant, self.admitted.hold)

    async def _read_body(self) -> bool:
        """Read the body, unless it is refused meanwhile. False if the client left."""
        if self.modes.request == BUFFERED:
            await self.write(ProcessingResponse(request_headers={}))
        timeout_s, loop, progress_bytes = self._limits.request_timeout_s, asyncio.get_running_loop(), PROGRESS_BYTES
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while self.refusal is None:
                    message = await self.read()
                    if message is None:
                        return False
                    if self._add(message):
                        break
                    if self.buffered_bytes >= progress_bytes:
                        progress_bytes = self.buffered_bytes + PROGRESS_BYTES
                        limit.reschedule(loop.time() + timeout_s)
        except TimeoutError:
            self.refuse(late_request(self._limits))
        self._memory.arriving.pop(self, None)
        sent = self.body = b"".join(self.pieces)
        self.pieces = []
        try:
            await self._edge.make_plain(self)
            if (model := self.head.named.get(MODEL_HEADER)) and self.refusal is None:  # it replaces the client's
                change = self.body, "model", model.decode("latin-1")
                self.body = await _turns.run(self.admitted.tenant, self.body, with_field, *change)
        except MalformedRequest as error:
            self.refuse(error)
        self.is_rewritten = self.body is not sent
        return True

    def _add(self, message: Any) -> bool:
        """Take a part of the body, or all of it where the gateway buffers. Returns whether it was the last one."""
        if message.HasField("request_trailers"):
            self._has_trailers = True
            return True
        piece = message.request_body.body
        now_s = asyncio.get_running_loop().time()
        if piece and self._memory.take(self, len(piece), self._limits.max_body_bytes, now_s):
            self.pieces.append(piece)
        return bool(message.request_body.end_of_stream) or self.modes.request == BUFFERED

    def refuse(self, error: RouterError) -> None:
        """See `BodyHolder`."""
        self._memory.release(self)
        self.refusal = error

    def outlives_client(self) -> asyncio.Event:
        """See `AnyExchange`. The task of a stream that is reset is cancelled."""
        return asyncio.Event()

    # --- the pick ---

    async def pick(
        self, addresses: str, headers: HeaderList, removed: list[bytes], body: bytes, *, is_changed: bool
    ) -> None:
        """Name the pods to the gateway, the best first. `is_changed`: whether the body is not the received one."""
        self.is_picked = True
        response = ProcessingResponse()
        fields = response.dynamic_metadata.fields.add(key=b"envoy.lb").value.struct_value
        fields.fields.add(key=POD_HEADER).value.string_value = addresses.encode()
        is_buffered = self.has_body and self.modes.request == BUFFERED
        common = (response.request_body if is_buffered else response.request_headers).response
        common.clear_route_cache = True
        set_headers(common.header_mutation, [(POD_HEADER, addresses.encode()), *headers])
        common.header_mutation.remove_headers.extend(removed)
        if is_buffered and (is_changed or self.is_rewritten):
            common.body_mutation.body = body
            set_headers(common.header_mutation, [(b"content-length", b"%d" % len(body))])
        await self.write(response)
        if self.has_body and not is_buffered:
            await self._send_body(body)
        self.body = b""
        self._memory.release(self)

    async def _send_body(self, body: bytes) -> None:
        """Send the whole body back: in this mode Envoy has kept nothing of it."""
        for start in range(0, len(body) or 1, CHUNK_BYTES):
            response = ProcessingResponse()
            chunk = response.request_body.response.body_mutation.streamed_response
            chunk.body = body[start : start + CHUNK_BYTES]
            chunk.end_of_stream = start + CHUNK_BYTES >= len(body) and not self._has_trailers
            await self.write(response)
        if self._has_trailers:
            await self.write(ProcessingResponse(request_trailers={}))

    # --- the router's own answer (`Downstream`) ---

    @property
    def started(self) -> bool:
        """Whether the gateway has an answer."""
        return self.is_picked or self._answer is not None

    @property
    def disconnected(self) -> bool:
        """Whether the gateway has reset the stream."""
        return not self.is_stopping and self._task is not None and self._task.cancelling() > 0

    def start(self, status: int, headers: HeaderList) -> None:
        response = ProcessingResponse().immediate_response
        response.status.code = status
        set_headers(response.headers, [header for header in headers if header[0] != b"content-length"])
        self._answer = response

    def put(self, piece: bytes) -> bool:
        self.pieces.append(piece)
        return True

    async def ready(self) -> None:
        """Return: answers are sent whole."""

    def finish(self) -> None:
        self._answer.body, self.pieces = b"".join(self.pieces), []
        self.response_complete = True


@lru_cache(maxsize=256)
def _open_tenant(band: int) -> Tenant:
    return Tenant(band=band) if band else OPEN_TENANT


def set_headers(mutation: Any, headers: HeaderList) -> None:
    """Replace or add headers."""
    for name, value in headers:
        added = mutation.set_headers.add(append_action=OVERWRITE)
        added.header.key, added.header.raw_value = name, value


def _split(headers: Iterable[Any]) -> tuple[dict[bytes, bytes], HeaderList]:
    """The pseudo-headers of HTTP/2, and the others, with names in lower case."""
    pairs = [(one.key.lower(), one.raw_value or one.value) for one in headers]
    pseudo = {name: value for name, value in pairs if name.startswith(b":")}
    return pseudo, [pair for pair in pairs if not pair[0].startswith(b":")]


MAX_WAITING = 4
"""Messages that wait for the gateway before the pod does."""


class AnsweringExchange(GatewayExchange):
    """A `Downstream` whose pieces a task writes, one after the other, in the speed of the gateway."""

    answers = True

    def __init__(self, call: Any, terms: GatewayTerms) -> None:
        super().__init__(call, terms)
        self._messages = deque[bytes]()
        self._writer: asyncio.Task[None] | None = None

    async def end(self) -> None:
        """Wait until the gateway has all of the response. One that broke is not to look whole."""
        if not self.started:
            return
        if not await self._drained():
            self.was_reset = True
        elif not self.response_complete:
            await self._call.abort(grpc.StatusCode.UNAVAILABLE, "warmroute picker: the response has broken")

    # --- `Downstream` ---

    def start(self, status: int, headers: HeaderList) -> None:
        self._answer, self.sends_events = headers, media_type(dict(headers)) == EVENT_STREAM
        self.body = b""
        self._memory.release(self)
        message = ProcessingResponse()
        sent = message.streamed_immediate_response.headers_response.headers.headers
        for name, value in [(b":status", b"%d" % status), *headers]:
            sent.add(key=name, raw_value=value)
        self._send(message)

    def put(self, piece: bytes) -> bool:
        for begin in range(0, len(piece), CHUNK_BYTES):
            self._send_piece(piece[begin : begin + CHUNK_BYTES], ends=False)
        return len(self._messages) <= MAX_WAITING

    async def ready(self) -> None:
        """Wait until the gateway has taken what was put. One whose client never reads is left."""
        if self._writer is None or self._writer.done():
            await asyncio.sleep(0)
            return
        self.was_slow = True
        if not await self._drained() and self._task is not None:
            self._task.cancel()
            await asyncio.sleep(0)

    async def _drained(self) -> bool:
        """Wait until the gateway has taken what was put. One that takes nothing for a while gets a status after what
        gRPC has of the response: return False."""
        waiting = {self._writer} if self._writer is not None else set()
        while waiting:
            before = len(self._messages)
            _, waiting = await asyncio.wait(waiting, timeout=self._limits.slow_read_timeout_s)
            if waiting and len(self._messages) == before:
                waiting.pop().cancel()
                why = "warmroute picker: the response was not read"
                with suppress(TimeoutError, grpc.aio.BaseError):
                    async with asyncio.timeout(0):
                        await self._call.abort(grpc.StatusCode.UNAVAILABLE, why)
                return False
        return True

    def finish(self) -> None:
        self._send_piece(b"", ends=True)
        self.response_complete = True

    def _send_piece(self, piece: bytes, *, ends: bool) -> None:
        message = ProcessingResponse()
        body = message.streamed_immediate_response.body_response
        body.body, body.end_of_stream = piece, ends
        self._send(message)

    def _send(self, message: Any) -> None:
        self._messages.append(message.SerializeToString())
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        """Where the gateway has reset the stream, gRPC cancels the request."""
        with suppress(grpc.aio.BaseError):
            while self._messages:
                await self._call.write(self._messages.popleft())
        self._messages.clear()
