"""Serves the `/v1` endpoints that are forwarded to pods.

`admit` refuses what its head alone shows, for every front; `serve` reads the body once, which may be refused, too
(`request/reading.py`). Then the forwarder answers, and its exceptions become error responses. The task is cancelled
when the client disconnects.
"""

from __future__ import annotations

import asyncio
import re
import time
from codecs import BOM_UTF8
from collections.abc import Mapping
from functools import partial
from random import getrandbits
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace
from starlette.types import ASGIApp

from router.admission.fair_bound import FairBound
from router.admission.gate import AdmissionGate
from router.admission.tenant import OPEN_TENANT, Admitted, Tenant
from router.config.schema import Edge, Limits
from router.endpoints import conventions_of, endpoint_of
from router.engines.forwarded_paths import ForwardedPaths
from router.errors import MethodNotAllowed, NoReadyPod, RouterError, Stopping, UpstreamError
from router.frontends.fair_turns import BurstPlaces, FairTurns
from router.frontends.http.attempt import Forwarder
from router.frontends.http.exchange import Exchange
from router.frontends.http.form_fields import FormFields, Forms, declares_form, with_model, with_usage_asked
from router.frontends.http.http_edge import AnyExchange, HttpEdge, send_error
from router.frontends.http.large_bodies import LargeBodies
from router.frontends.http.relay import end_broken_stream
from router.frontends.http.request_head import CorsPolicy
from router.frontends.response_locator import ResponseLocator
from router.index.stored_responses import StoredResponse, id_in_path
from router.observe.tracing import Tracing
from router.phases import Phases
from router.request.context import RequestContext
from router.request.endings import Endings
from router.request.error_responses import stream_error_body
from router.request.inbound import EVENT_STREAM, Head, HeaderList, Trace
from router.request.reading import RequestReader
from router.request.response_reader import reader_of
from router.types import Endpoint, InferenceRequest, UsageShown

if TYPE_CHECKING:
    from router.frontends.held_requests import HeldRequests

_JSON = b"application/json"
_EVENTS: HeaderList = [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache")]
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
        own: ASGIApp,
        gate: AdmissionGate,
        forwarder: Forwarder,
        endings: Endings,
        reader: RequestReader,
        responses: ResponseLocator,
        edge: Edge,
        limits: Limits,
        tracing: Tracing | None = None,
        memory: FairBound | None = None,
        held: HeldRequests | None = None,
    ) -> None:
        super().__init__(limits, own, memory)
        self.methods = ForwardedPaths((*edge.extra_paths, *edge.control_paths)).methods
        self._gate = gate
        self._forwarder = forwarder
        self._endings = endings
        self._reader = reader
        self._responses = responses
        self._tracing = tracing
        self._edge = edge
        self._keeps_open = edge.keep_alive_s is not None
        self._held = held
        if edge.cors_origins:
            self.cors = CorsPolicy(edge.cors_origins)
        self._turns = turns = FairTurns()
        self._large_bodies = LargeBodies(limits.max_json_items, turns)
        self._forms = Forms(turns, trusted=edge.trust_engine_fields)
        self._bursts = BurstPlaces()
        self.in_flight = FairBound(limits.max_in_flight, "requests in flight", "limits.max_in_flight")

    # --- admission ---

    def identity(self, headers: HeaderList, named: Mapping[bytes, bytes]) -> tuple[str, str, Trace | None]:
        """The client's request id if it is harmless, else a new one: the id of the trace, if that begins here. Engines
        build their own ids from it, and vLLM's P2P connector reads the addresses of pods from an id with
        `___prefill_addr_HOST:PORT`."""
        trace, given = None, named.get(b"x-request-id", b"")
        if self._tracing is not None:
            trace = self._tracing.begin(headers, named)
        if _SAFE_ID.fullmatch(given):
            return given.decode(), "", trace
        begins = trace is not None and not trace.parent_id
        number = trace.trace_id if trace is not None and begins else f"{getrandbits(128):032x}"
        return f"req-{number}", given[:MAX_ID_CHARACTERS].decode("latin-1"), trace

    def admit(self, head: Head, now_s: float, *, is_next: bool = True) -> tuple[Admitted, RouterError | None]:
        """Who sent a request, and why its head is refused. The cheapest check that discloses least is first. The share
        and the quota of the tenant are last, if the request begins now; the quota counts it until `has_arrived`."""
        admitted, methods = Admitted(head.network), head.methods
        if methods and not head.fault:
            if is_next and self.in_flight.is_full:
                return admitted, self.in_flight.refusal("", 1.0)
            if head.method not in methods:
                return admitted, MethodNotAllowed(f"{head.path} does not support {head.method}.", methods)
        if methods or head.fault:
            if fault := self.fault(head):
                return admitted, fault
        elif not head.needs_key:
            return admitted, None
        tenant = self._gate.admit(head.path, head.named, now_s)
        if isinstance(tenant, RouterError):
            return admitted, tenant
        owner, hold = head.network if tenant is OPEN_TENANT else tenant.name, None
        admitted = Admitted(owner, tenant)
        if not (methods and is_next):
            return admitted, None
        if not self.in_flight.has_room(owner, tenant.weight, 1):
            return admitted, self.in_flight.refusal(owner, tenant.weight)
        if not tenant.quotas:
            return admitted, None
        hold = self._endings.receive(tenant, endpoint_of(head.path))
        return (admitted, hold) if isinstance(hold, RouterError) else (Admitted(owner, tenant, hold), None)

    # --- requests ---

    async def serve(self, client: AnyExchange) -> None:
        """Answer one request. Cancelled when the client disconnects."""
        head, admitted, context = client.head, client.admitted, None
        owner, weight = admitted.owner, admitted.tenant.weight
        is_counted = client.refusal is None and self.in_flight.take(owner, weight, 1)
        if client.refusal is None and not is_counted:
            client.refusal = self.in_flight.refusal(owner, weight)
        try:
            if (place := self._bursts.place(owner)) is not None:
                await place
                if self.in_flight.is_shared:
                    async with self.response_turns.turn(admitted.tenant, 0, len(client.body)):
                        await asyncio.sleep(0)
            context = await (self._read(client) if self._held is None else self._read_when_served(client, self._held))
            if admitted.hold is not None:
                self._endings.has_arrived(admitted.hold)
            if len(client.body) > READ_ALONE_BYTES:
                await asyncio.sleep(0)
            if self._keeps_open and context.request.stream:
                self._keep_open(client)
            await self._forwarder.forward(context, client)
        except asyncio.CancelledError:
            if not client.disconnected:
                self._answer(client, Stopping("The router is stopping."))
            raise
        except Exception as error:
            if context is None:
                self._endings.refused(endpoint_of(head.path), error, head.id, head.trace, admitted.tenant)
            if not isinstance(error, RouterError):
                log.exception("request failed", request_id=head.id)
            self._answer(client, error)
            error.__traceback__ = None  # a frame in it may have the error, and the body: a cycle stays in memory
        finally:
            if is_counted:
                self.in_flight.give_back(owner, 1)
            if admitted.hold is not None:
                self._endings.has_arrived(admitted.hold)
            client.refusal = None  # its traceback refers to the body: a cycle that would stay in memory

    def _keep_open(self, client: AnyExchange) -> None:
        generates = endpoint_of(client.head.path).api.generates
        if self._edge.keep_alive_s and generates and isinstance(client, Exchange):
            ping = conventions_of(client.head.path).ping
            client.keep_open(self._edge.keep_alive_s, ping, [*_EVENTS, *_names_of(client.head)])

    async def _read_when_served(self, client: AnyExchange, held: HeldRequests) -> RequestContext:
        """The request, read once a pod serves its model: a pod that starts may have other settings. Raises as `_read`,
        also where the request may not wait longer."""
        until_s = asyncio.get_running_loop().time() + held.hold_s
        while True:
            try:
                context = await self._read(client)
                if (error := held.unserved(context, self._reader.hosted)) is None:
                    context.held_until_s = until_s
                    return context
            except NoReadyPod as found:
                if not found.model:
                    raise
                error = found.with_traceback(None)  # else a cycle with this frame, which keeps the body
            if error.stream:
                self._keep_open(client)
            try:
                await held.wait(error, (admitted := client.admitted), len(client.body), until_s)
                client.admitted = Admitted(admitted.owner, self._gate.again(admitted.tenant), admitted.hold)
            except asyncio.CancelledError:
                if client.disconnected:
                    self.abandoned(client)
                raise

    async def _read(self, client: AnyExchange) -> RequestContext:
        """Parse and check the request. Raises why it is refused: a `ClientError`, or `NoReadyPod` if no pod of its
        model has started yet."""
        head, admitted, request, stored = client.head, client.admitted, None, None
        try:
            if b"content-encoding" in head.named or client.body.startswith(BOM_UTF8):
                await self.make_plain(client)
            if client.refusal is not None:
                raise client.refusal
            endpoint, is_json = endpoint_of(head.path), head.named.get(b"content-type") == _JSON
            if not is_json or self._large_bodies.needs_check(client.body):
                request = await self._read_large(client, endpoint)
            if stored_id := id_in_path(head.path):
                stored = await self._responses.locate(stored_id, "response_id", admitted.tenant.name)
        finally:
            phases = Phases(time.monotonic())
            if head.trace is not None:
                head.trace.phases = phases
        if request is None:
            request = self._reader.read(
                *(endpoint, head.named, client.body, head.id, admitted.tenant, stored.model if stored else ""),
                stored_model=stored.model if stored else "",
                sees_response=client.sees_response,
            )
        if request.name and (previous := request.prompt.get("previous_response_id")):
            request, stored = await self._continued(client, request, previous)
        context = RequestContext(request, head, phases, admitted.tenant, admitted.owner, reader=reader_of(endpoint))
        if stored is not None:
            context.stored_pod = stored.pod
        return context

    async def _continued(
        self, client: AnyExchange, request: InferenceRequest, previous: str
    ) -> tuple[InferenceRequest, StoredResponse]:
        """The request for a name that continues a stored response, by the model that the response is of."""
        head, tenant = client.head, client.admitted.tenant
        stored = await self._responses.locate(previous, "previous_response_id", tenant.name)
        if stored.model == (request.adapter or request.model):
            return request, stored
        arguments = request.endpoint, head.named, client.body, head.id, tenant
        again = partial(self._reader.read, stored_model=stored.model, sees_response=client.sees_response)
        return await self._turns.run(tenant, client.body, again, *arguments), stored

    async def _read_large(self, client: AnyExchange, endpoint: Endpoint) -> InferenceRequest | None:
        """The request, if its body is large or may be a form; None for JSON bodies that are read without a check."""
        head, body, tenant = client.head, client.body, client.admitted.tenant
        content_type = head.named.get(b"content-type", b"")
        if body and content_type != _JSON and declares_form(content_type):
            fields = await self._forms.read(endpoint, body, content_type, tenant)
            if fields.model:
                request = self._reader.read(endpoint, head.named, body, head.id, tenant, fields.model)
                if request.name:
                    change = body, fields, request.adapter or request.model
                    form = await self._turns.run(tenant, body, with_model, *change)
                    request = replace(request, body=form, fallbacks=())
                return await self._with_usage(client, request, fields)
        elif not self._large_bodies.needs_check(body):
            return None
        return await self.read(endpoint, head.named, body, head.id, tenant, sees_response=client.sees_response)

    async def _with_usage(self, client: AnyExchange, request: InferenceRequest, fields: FormFields) -> InferenceRequest:
        """The request of a form. A streamed transcription asks for its usage, which its client sees if it asked."""
        if not (fields.streams and client.sees_response and client.head.path in _TRANSCRIBING):
            return request
        if fields.asks_usage:
            return replace(request, usage=UsageShown.AT_END)
        body = await self._turns.run(client.admitted.tenant, request.body, with_usage_asked, request.body)
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
            return await self._turns.run(tenant, body, read, endpoint, named, body, request_id, tenant)
        return read(endpoint, named, body, request_id, tenant)

    def abandoned(self, client: AnyExchange) -> None:
        """Settle a request whose client disconnected before it was served."""
        if client.admitted.hold is not None:
            self._endings.has_arrived(client.admitted.hold)
        self._endings.abandoned(endpoint_of(client.head.path), client.admitted.tenant.name)

    def standalone_error(self, error: RouterError) -> bytes:
        self._endings.refused(Endpoint.OTHER, error)
        return super().standalone_error(error)

    def _answer(self, client: AnyExchange, error: Exception) -> None:
        head, names_pods = client.head, self._edge.route_headers
        if client.kept_open and not client.response_complete:
            client.start(200, _EVENTS)
            end_broken_stream(client, stream_error_body(error, head.path, names_pods=names_pods))
            return
        if client.started:
            if client.sends_events and not client.response_complete and isinstance(error, UpstreamError | Stopping):
                end_broken_stream(client, stream_error_body(error, head.path, names_pods=names_pods))
            return
        send_error(client, error, *_names_of(head), names_pods=names_pods)


def _names_of(head: Head) -> HeaderList:
    """The headers by which a request is found again."""
    return [(b"x-request-id", head.id.encode()), *([] if head.trace is None else [head.trace.context()])]
