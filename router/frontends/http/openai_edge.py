"""Serves the `/v1` endpoints that are forwarded to pods.

The body is parsed once, the forwarder answers, and its exceptions become error responses. The task is cancelled
when the client disconnects.
"""

from __future__ import annotations

import asyncio
import re
import time
from codecs import BOM_UTF8
from collections.abc import Mapping
from functools import partial
from itertools import chain
from random import getrandbits

import structlog
from msgspec.structs import replace

from router.admission.fair_bound import FairBound
from router.admission.tenant import Tenant
from router.config.edge_schema import Edge
from router.config.schema import Limits
from router.endpoints import endpoint_of
from router.engines.forwarded_paths import ForwardedPaths
from router.errors import MalformedRequest, MethodNotAllowed, RouterError, Stopping, UpstreamError
from router.frontends.body_edits import BodyEdits
from router.frontends.fair_turns import BurstPlaces, FairTurns
from router.frontends.http.attempt import Forwarder
from router.frontends.http.cors import CorsPolicy
from router.frontends.http.exchange import ReceivedRequest
from router.frontends.http.form_fields import FormFields, Forms, declares_form, with_usage_asked
from router.frontends.http.http_edge import AnyExchange, HttpEdge, send_error
from router.frontends.http.large_bodies import LargeBodies
from router.frontends.http.relay import end_broken_stream
from router.frontends.response_locator import ResponseLocator
from router.index.stored_responses import StoredResponse, id_in_path
from router.observe.tracing import RequestTrace, Tracing
from router.phases import Phases
from router.request.context import RequestContext
from router.request.endings import Endings
from router.request.error_responses import headers_too_large, stream_error_body
from router.request.inbound import Head
from router.request.reading import RequestReader
from router.request.response_reader import reader_of
from router.types import Endpoint, InferenceRequest, UsageShown

_JSON = b"application/json"
_TRANSCRIBING = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
MAX_ID_CHARACTERS = 128
_SAFE_ID = re.compile(rb"(?!.*___)[A-Za-z0-9._-]{1,%d}" % MAX_ID_CHARACTERS)

READ_ALONE_BYTES = 64 * 1024
"""A larger body is read in one turn of the event loop and decided in another: each takes up to 3 ms."""

log = structlog.get_logger()


class OpenAiEdge(HttpEdge):
    own_bodies = False

    def __init__(
        self,
        forwarder: Forwarder,
        endings: Endings,
        reader: RequestReader,
        responses: ResponseLocator,
        edge: Edge,
        limits: Limits,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(limits, ForwardedPaths((*edge.extra_paths, *edge.control_paths)).methods)
        self._forwarder = forwarder
        self._endings = endings
        self._reader = reader
        self._responses = responses
        self._tracing = tracing
        self._edge = edge
        if edge.cors_origins:
            self.cors = CorsPolicy(edge.cors_origins)
        turns = FairTurns()
        self._large_bodies = LargeBodies(limits.max_json_items, turns)
        self._forms = Forms(turns, trusted=edge.trust_engine_fields)
        self._body_edits = BodyEdits()
        self._bursts = BurstPlaces()
        self.in_flight = FairBound(limits.max_in_flight, "requests in flight", "limits.max_in_flight")

    def refusal(self, received: ReceivedRequest, methods: frozenset[str]) -> RouterError | None:
        headers, named, limits = received.headers, received.named, self.limits
        if not methods:
            return None  # the listener's own application reads no body
        if received.is_next and self.in_flight.is_full:
            return self.in_flight.refusal("", 1.0)
        if received.method not in methods:
            return MethodNotAllowed(f"{received.path} does not support {received.method}.", methods)
        if sum(map(len, chain.from_iterable(headers))) > limits.max_header_bytes:
            return headers_too_large(limits)
        if (too_large := super().refusal(received, methods)) is not None:
            return too_large
        if len(named) != len(headers) and sum(name == b"content-type" for name, _ in headers) > 1:
            return MalformedRequest("There are several Content-Type headers; send one.")
        return None

    def tenant_refusal(self, received: ReceivedRequest) -> RouterError | None:
        """Why its tenant's share or quota refuses a request before its body is read; None if it does not. The request
        then counts among the concurrent ones of its tenant."""
        tenant = received.tenant
        if not self.in_flight.has_room(received.owner, tenant.weight, 1):
            return self.in_flight.refusal(received.owner, tenant.weight)
        if not tenant.quotas:
            return None
        found = self._endings.receive(tenant, endpoint_of(received.path))
        if isinstance(found, RouterError):
            return found
        received.arriving = found
        return None

    def _begin(self, received: ReceivedRequest) -> bool:
        """Whether the request counts as being served: it is not refused, also not because too many are."""
        owner, weight = received.owner, received.tenant.weight
        if received.refusal is None and not self.in_flight.take(owner, weight, 1):
            received.refusal = self.in_flight.refusal(owner, weight)
        return received.refusal is None

    def _end(self, received: ReceivedRequest, *, counted: bool) -> None:
        if counted:
            self.in_flight.give_back(received.owner, 1)
        self._endings.has_arrived(received.arriving)
        received.arriving = None
        received.refusal = None  # its traceback refers to the body: a cycle that would stay in memory

    async def serve(self, client: AnyExchange) -> None:
        """Answer one request. Cancelled when the client disconnects."""
        received, trace = client.received, None
        if self._tracing is not None:
            trace = self._tracing.begin(received.headers, received.named)
        request_id, counted = checked_id(received.named, trace), self._begin(received)
        try:
            if (place := self._bursts.place(received.owner)) is not None:
                await place
                if self.in_flight.is_shared:
                    async with self.response_turns.turn(received.tenant, 0, len(received.body)):
                        await asyncio.sleep(0)
            if b"content-encoding" in received.named or received.body.startswith(BOM_UTF8):
                await self.make_plain(client)
            read = await self._read_large(received, request_id) if self._takes_long(received) else None
            stored = await self._stored(received, request_id, trace)
            context = self.admit(received, request_id, read, trace, stored.model if stored else "")
            if stored is not None:
                context.concerns(stored)
            if received.arriving is not None:
                self._endings.has_arrived(received.arriving)
            if len(received.body) > READ_ALONE_BYTES:
                await asyncio.sleep(0)
            await self._forwarder.forward(context, client)
        except asyncio.CancelledError:
            if not client.disconnected:
                self._fail(client, Stopping("The router is stopping."), request_id, trace)
            raise
        except RouterError as error:
            self._fail(client, error, request_id, trace)
        except Exception as error:
            log.exception("request failed", request_id=request_id)
            self._fail(client, error, request_id, trace)
        finally:
            self._end(received, counted=counted)

    async def _stored(
        self, received: ReceivedRequest, request_id: str, trace: RequestTrace | None
    ) -> StoredResponse | None:
        """The stored response that the path names; None for other paths. Raises `UnknownResponse`."""
        stored_id = id_in_path(received.path)
        if not stored_id or received.refusal is not None:
            return None
        try:
            return await self._responses.locate(stored_id, "response_id", received.tenant.name)
        except RouterError as error:
            self._endings.refused(Endpoint.OTHER, error, request_id, trace, received.tenant)
            raise

    def _takes_long(self, received: ReceivedRequest) -> bool:
        return received.named.get(b"content-type") != _JSON or self._large_bodies.needs_check(received.body)

    async def _read_large(self, received: ReceivedRequest, request_id: str) -> InferenceRequest | None:
        """The request, if its body is large; else let `admit` read it. Also let `admit` refuse a body that would take
        long to decode, or a form that may steer the engine."""
        body, content_type = received.body, received.named.get(b"content-type", b"")
        is_form = bool(body) and content_type != _JSON and declares_form(content_type)
        if not (is_form or self._large_bodies.needs_check(body)) or received.refusal is not None:
            return None
        endpoint, tenant = endpoint_of(received.path), received.tenant
        try:
            if is_form:
                fields = await self._forms.read(endpoint, body, content_type, tenant)
                if fields.model:
                    request = self._reader.read(endpoint, received.named, body, request_id, tenant, fields.model)
                    return await self._with_usage(received, request, fields)
            return await self.read(
                endpoint, received.named, body, request_id, tenant, sees_response=received.sees_response
            )
        except RouterError as error:
            received.refusal = error
            return None

    async def _with_usage(
        self, received: ReceivedRequest, request: InferenceRequest, fields: FormFields
    ) -> InferenceRequest:
        """The request of a form. A streamed transcription asks for its usage, which its client sees if it asked."""
        if not (fields.streams and received.sees_response and received.path in _TRANSCRIBING):
            return request
        if fields.asks_usage:
            return replace(request, usage=UsageShown.AT_END)
        body = await self._body_edits.run(request.body, partial(with_usage_asked, request.body))
        return replace(request, usage=UsageShown.NONE, body=body)

    async def read(
        self,
        endpoint: Endpoint,
        named: Mapping[bytes, bytes],
        body: bytes,
        request_id: str,
        tenant: Tenant,
        *,
        sees_response: bool = False,
    ) -> InferenceRequest:
        """The request with a body that has not been checked. Raises like `RequestReader.read`."""
        read = partial(self._reader.read, sees_response=sees_response)
        if self._large_bodies.needs_check(body):
            await self._large_bodies.check(endpoint, body, tenant)
            return await self._large_bodies.decode(tenant, body, read, endpoint, named, body, request_id, tenant)
        return read(endpoint, named, body, request_id, tenant)

    def admit(
        self,
        received: ReceivedRequest,
        request_id: str,
        read: InferenceRequest | None = None,
        trace: RequestTrace | None = None,
        model: str = "",
    ) -> RequestContext:
        """Parse and check the request, unless it was `read`. `model`: that of a request whose path implies it. Raises
        `ClientError`, or `NoReadyPod` if no pod of its model has started yet."""
        phases = Phases(time.monotonic())
        if trace is not None:
            trace.phases = phases
        endpoint = endpoint_of(received.path)
        try:
            if received.refusal is not None:
                raise received.refusal
            request = read or self._reader.read(
                endpoint,
                received.named,
                received.body,
                request_id,
                received.tenant,
                model,
                sees_response=received.sees_response,
            )
        except Exception as error:
            self._endings.refused(endpoint, error, request_id, trace, received.tenant)
            raise
        given = received.named.get(b"x-request-id")
        shown_id = given[:MAX_ID_CHARACTERS].decode("latin-1") if given and given != request_id.encode() else ""
        head = Head(
            request_id,
            received.method,
            received.target,
            received.headers,
            received.path,
            received.named,
            received.peer,
            shown_id,
            trace,
            received.pods_allowed,
        )
        return RequestContext(
            request,
            head,
            phases,
            reader=reader_of(endpoint),
            tenant=received.tenant,
            owner=received.owner,
        )

    def abandoned(self, received: ReceivedRequest) -> None:
        """Settle a request whose client disconnected before it was served."""
        self._endings.has_arrived(received.arriving)
        self._endings.abandoned(endpoint_of(received.path), received.tenant.name)

    def standalone_error(self, error: RouterError) -> bytes:
        self._endings.refused(Endpoint.OTHER, error)
        return super().standalone_error(error)

    def _fail(self, client: AnyExchange, error: Exception, request_id: str, trace: RequestTrace | None) -> None:
        names_pods = self._edge.route_headers
        if client.started:
            if client.sends_events and not client.response_complete and isinstance(error, UpstreamError | Stopping):
                end_broken_stream(client, stream_error_body(error, client.received.path, names_pods=names_pods))
            return
        context = [] if trace is None else [trace.context()]
        send_error(client, error, (b"x-request-id", request_id.encode()), *context, names_pods=names_pods)


def checked_id(named: Mapping[bytes, bytes], trace: RequestTrace | None = None) -> str:
    """The client's request id if it is harmless, else a new one: the id of the trace, if that begins here. Engines
    build their own ids from it, and vLLM's P2P connector reads the addresses of pods from an id with
    `___prefill_addr_HOST:PORT`."""
    given = named.get(b"x-request-id")
    if given and _SAFE_ID.fullmatch(given):
        return given.decode()
    if trace is not None and not trace.parent_id:
        return f"req-{trace.trace_id}"
    return f"req-{getrandbits(128):032x}"
