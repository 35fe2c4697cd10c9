"""Serves the `/v1` endpoints that are forwarded to pods.

The body is parsed once, the forwarder answers, and its exceptions become error responses. The task is cancelled
when the client disconnects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from itertools import chain
from random import getrandbits
from typing import Any

import structlog

from router.admission.tenant import Tenant
from router.api.client_websocket import model_in_query
from router.api.cors import CorsPolicy
from router.api.error_responses import headers_too_large, response_for, stream_error_body
from router.api.exchange import Exchange, ReceivedRequest
from router.api.form_fields import Forms, declares_form
from router.api.http_edge import HttpEdge, send_error, whole_error
from router.api.large_bodies import LargeBodies
from router.api.parse import (
    has_engine_fields,
    may_be_json_object,
    parse_body,
    prompt_fields,
    read_other,
    without_engine_fields,
)
from router.api.salted_body import appended_salt, replaced_salt
from router.config.edge_schema import Edge
from router.config.schema import Limits
from router.engines.engine_catalog import accepts_salt
from router.engines.forwarded_paths import ForwardedPaths
from router.errors import (
    BodyTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    NoReadyPod,
    RouterError,
    Saturated,
    Stopping,
    UnknownModel,
    UpstreamError,
    code_of,
)
from router.fleet.fleet import Fleet
from router.index.stored_responses import StoredResponse, id_in_path
from router.observe.phase import Phases
from router.observe.receipts import CLIENT_GONE
from router.observe.tracing import RequestTrace, Tracing
from router.observe.unrouted_requests import UnroutedRequests
from router.proxy.forward import Forwarder
from router.proxy.headers import Inbound
from router.proxy.relay import end_broken_stream
from router.proxy.request_context import RequestContext
from router.proxy.response_reader import reader_of
from router.proxy.websockets import WebSocketClient
from router.types import MAX_NAME_CHARACTERS, MAY_NAME_NO_MODEL, Endpoint, InferenceRequest

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint if endpoint is not Endpoint.OTHER}
_JSON = b"application/json"
_IDENTITY = frozenset({b"", b"identity"})
"""Content encodings of an unencoded body."""
MAX_ID_CHARACTERS = 128
_SAFE_ID = re.compile(rb"(?!.*___)[A-Za-z0-9._-]{1,%d}" % MAX_ID_CHARACTERS)

log = structlog.get_logger()


class OpenAiEdge(HttpEdge):
    """Answers requests that are forwarded to pods."""

    def __init__(
        self,
        forwarder: Forwarder,
        fleet: Fleet,
        unrouted: UnroutedRequests,
        edge: Edge,
        limits: Limits,
        configured: frozenset[str],
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(limits, ForwardedPaths((*edge.extra_paths, *edge.control_paths)).methods)
        self.websocket_paths = frozenset({Endpoint.REALTIME.value})
        self._forwarder = forwarder
        self._fleet = fleet
        self._unrouted = unrouted
        self._tracing = tracing
        self._edge = edge
        if edge.cors_origins:
            self.cors = CorsPolicy(edge.cors_origins)
        self._large_bodies = LargeBodies(limits.max_json_items)
        self._forms = Forms(trusted=edge.trust_engine_fields)
        self._serving = 0
        self._configured = configured
        self._session_headers = tuple(name.encode() for name in edge.session_headers)
        self._tenant_header = edge.tenant_header.lower().encode()

    def refusal(self, received: ReceivedRequest, methods: frozenset[str]) -> RouterError | None:
        """Why a request is refused before its body is read; None if it is not."""
        headers, named, limits = received.headers, received.named, self.limits
        if received.method not in methods:
            return MethodNotAllowed(f"{received.path} does not support {received.method}.")
        if sum(map(len, chain.from_iterable(headers))) > limits.max_header_bytes:
            return headers_too_large(limits)
        declared = named.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limits.max_body_bytes:
            limit = f"{limits.max_body_bytes} bytes (limits.max_body_bytes)"
            return BodyTooLarge(f"The request body has {int(declared)} bytes, more than {limit}.")
        if b"content-encoding" in named and not _IDENTITY.issuperset(
            value for name, value in headers if name == b"content-encoding"
        ):
            return MalformedRequest("Encoded request bodies are not supported; send the body without content-encoding.")
        if len(named) != len(headers) and sum(name == b"content-type" for name, _ in headers) > 1:
            return MalformedRequest("There are several Content-Type headers; send one.")
        return None

    async def serve(self, client: Exchange) -> None:
        """Answer one request. Cancelled when the client disconnects."""
        received, trace = client.received, None
        if self._tracing is not None:
            trace = self._tracing.begin(received.headers, received.named)
        request_id = checked_id(received.named, trace)
        self._serving += 1
        try:
            read = await self._read_large(received, request_id) if self._takes_long(received) else None
            stored = await self._stored(received, request_id, trace)
            context = self.admit(received, request_id, read, trace, stored.model if stored else "")
            context.stored_pod = stored.pod if stored else ""
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
            self._serving -= 1
            client.received.refusal = None  # its traceback refers to the body: a cycle that would stay in memory

    async def serve_websocket(self, received: ReceivedRequest, client: WebSocketClient) -> None:
        """Serve one websocket until it is closed. Cancelled when the router stops."""
        request_id = checked_id(received.named)
        self._serving += 1
        try:
            model = model_in_query(received.target)
            context = self.admit(received, request_id, model=model)
            await self._forwarder.forward_websocket(context, client)
        except Exception as error:
            if not isinstance(error, RouterError):
                log.exception("websocket failed", request_id=request_id)
            if not client.started:
                client.writer.write(whole_error(error, names_pods=self._edge.route_headers))
        finally:
            self._serving -= 1
            received.refusal = None
            await client.close()

    async def _stored(
        self, received: ReceivedRequest, request_id: str, trace: RequestTrace | None
    ) -> StoredResponse | None:
        """The stored response that the path names; None for other paths. Raises `UnknownResponse`."""
        stored_id = id_in_path(received.path)
        if not stored_id or received.refusal is not None:
            return None
        try:
            return await self._forwarder.responses.locate(stored_id, "response_id", received.tenant.name)
        except RouterError as error:
            self.refused(Endpoint.OTHER, error, request_id, trace, received.tenant.name)
            raise

    def _takes_long(self, received: ReceivedRequest) -> bool:
        """Whether the body may be large or a form."""
        return received.named.get(b"content-type") != _JSON or self._large_bodies.are_checked(received.body)

    async def _read_large(self, received: ReceivedRequest, request_id: str) -> InferenceRequest | None:
        """The request, if its body is large; else let `admit` read it. Also let `admit` refuse a body that would take
        long to decode, or a form that may steer the engine."""
        body, content_type = received.body, received.named.get(b"content-type", b"")
        is_form = bool(body) and content_type != _JSON and declares_form(content_type)
        if not (is_form or self._large_bodies.are_checked(body)) or received.refusal is not None:
            return None
        endpoint = _ENDPOINTS.get(received.path, Endpoint.OTHER)
        try:
            if is_form:
                model = await self._forms.model(endpoint, body, content_type)
                if model:
                    return self.inference(endpoint, received.named, body, request_id, received.tenant, model)
            return await self.read(endpoint, received.named, body, request_id, received.tenant)
        except RouterError as error:
            received.refusal = error
            return None

    async def read(
        self, endpoint: Endpoint, named: Mapping[bytes, bytes], body: bytes, request_id: str, tenant: Tenant
    ) -> InferenceRequest:
        """`inference` for a body that has not been checked."""
        if self._large_bodies.are_checked(body):
            await self._large_bodies.check(endpoint, body, tenant.name)
            return await self._large_bodies.decode(body, self.inference, endpoint, named, body, request_id, tenant)
        return self.inference(endpoint, named, body, request_id, tenant)

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
        phases = Phases()
        if trace is not None:
            trace.phases = phases
        endpoint = _ENDPOINTS.get(received.path, Endpoint.OTHER)
        try:
            if received.refusal is not None:
                raise received.refusal
            if self._serving > self.limits.max_in_flight:
                count = self.limits.max_in_flight
                raise Saturated(f"{count} requests are in flight (limits.max_in_flight); retry later.")
            request = read or self.inference(
                endpoint, received.named, received.body, request_id, received.tenant, model
            )
        except Exception as error:
            self.refused(endpoint, error, request_id, trace, received.tenant.name)
            raise
        given = received.named.get(b"x-request-id")
        shown_id = given[:MAX_ID_CHARACTERS].decode("latin-1") if given and given != request_id.encode() else ""
        inbound = Inbound(
            request_id, received.method, received.target, received.headers, received.peer, shown_id, trace
        )
        return RequestContext(request, inbound, phases, reader=reader_of(endpoint), tenant=received.tenant)

    def abandoned(self, received: ReceivedRequest) -> None:
        """Count a request whose client disconnected before it was served."""
        endpoint = _ENDPOINTS.get(received.path, Endpoint.OTHER).value
        self._unrouted.ended(endpoint, CLIENT_GONE)
        self._unrouted.bill(received.tenant.name, endpoint, CLIENT_GONE)

    def standalone_error(self, error: RouterError) -> bytes:
        self.refused(Endpoint.OTHER, error)
        return super().standalone_error(error)

    def refused(
        self,
        endpoint: Endpoint,
        error: Exception,
        request_id: str = "",
        trace: RequestTrace | None = None,
        tenant: str = "",
    ) -> None:
        """Count and log a request that was refused before it was routed. `tenant`: who sent it, if that is known."""
        model = error.model if isinstance(error, NoReadyPod) else ""
        status = response_for(error).status
        self._unrouted.ended(
            endpoint.value,
            code_of(error),
            model=model,
            request_id=request_id,
            status=status,
            error=str(error),
            trace=trace,
        )
        self._unrouted.bill(tenant, endpoint.value, code_of(error), request_id, status, model)

    def _fail(self, client: Exchange, error: Exception, request_id: str, trace: RequestTrace | None) -> None:
        names_pods = self._edge.route_headers
        if client.started:
            if client.streams and not client.response_complete and isinstance(error, UpstreamError | Stopping):
                end_broken_stream(client, stream_error_body(error, client.received.path, names_pods=names_pods))
            return
        context = [] if trace is None else [trace.context()]
        send_error(client, error, (b"x-request-id", request_id.encode()), *context, names_pods=names_pods)

    def inference(
        self,
        endpoint: Endpoint,
        named: Mapping[bytes, bytes],
        body: bytes,
        request_id: str,
        tenant: Tenant,
        given_model: str = "",
    ) -> InferenceRequest:
        """The request to route. `given_model`: that of a request whose body may name none.
        Raises `ClientError` or `NoReadyPod`."""
        if endpoint in MAY_NAME_NO_MODEL:
            parsed = None if given_model else read_other(body)
        else:
            parsed = parse_body(endpoint, body, max_messages=self.limits.max_messages)
        base, adapter = self._resolve((parsed and parsed.model) or given_model or self._only_model(tenant), tenant)
        if not self._edge.trust_engine_fields and (has_engine_fields(parsed) if parsed else may_be_json_object(body)):
            body = without_engine_fields(body)
        given_salt = getattr(parsed, "cache_salt", None)
        salt = tenant.salted(given_salt if isinstance(given_salt, str) else "")
        if tenant.salt and body and accepts_salt(self._fleet.snapshot, adapter or base, endpoint):
            if parsed and parsed.model and given_salt is None:
                body = appended_salt(body, salt)
            elif parsed or may_be_json_object(body):
                body = replaced_salt(body, salt)
        return InferenceRequest(
            id=request_id,
            endpoint=endpoint,
            model=base,
            adapter=adapter,
            body=body,
            stream=bool(getattr(parsed, "stream", False)),
            tenant=tenant.name or _name(named, self._tenant_header),
            session=_session_of(tenant, self._session(named) or getattr(parsed, "session_id", None) or ""),
            salt=salt,
            max_output_tokens=_max_output_tokens(parsed),
            prompt=prompt_fields(endpoint, parsed) if parsed else {},
        )

    def _session(self, named: Mapping[bytes, bytes]) -> str:
        """The session id of the first header that has one; empty without one."""
        for header in self._session_headers:
            if named.get(header):
                return _name(named, header)
        return ""

    def _resolve(self, model: str, tenant: Tenant) -> tuple[str, str]:
        """Base model and adapter. One that the tenant may not use does not exist for it."""
        found = self._fleet.resolve(model)
        if found is None and model in self._configured and tenant.may_use(model, ""):
            raise NoReadyPod(f"No pod that serves `{model}` has started yet; retry later.", model=model)
        if found is None or not tenant.may_use(*found):
            raise UnknownModel(f"The model `{model}` does not exist.", param="model")
        return found

    def _only_model(self, tenant: Tenant) -> str:
        """The model of a request that names none: the only one that the tenant may use."""
        served = {model for status in self._fleet.snapshot.pods for model in status.pod.models}
        usable = [model for model in served if tenant.may_use(model, "")]
        if len(usable) != 1:
            raise MalformedRequest("Set `model` in a JSON body or a form: several models are served.", param="model")
        return usable[0]


def _session_of(tenant: Tenant, given: str) -> str:
    """The session id, apart from those of other tenants."""
    return f"{tenant.name}/{given}" if given and tenant.name else given


def _name(named: Mapping[bytes, bytes], header: bytes) -> str:
    """The value of a header; empty if it is absent. `MalformedRequest` if it is too long to keep."""
    value = named.get(header)
    if not value:
        return ""
    if len(value) > MAX_NAME_CHARACTERS:
        name = header.decode()
        raise MalformedRequest(
            f"The header `{name}` has {len(value)} characters, more than {MAX_NAME_CHARACTERS}.", param=name
        )
    return value.decode("latin-1")


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


def _max_output_tokens(parsed: Any) -> int | None:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    limit = next((found for name in names if (found := getattr(parsed, name, None))), None)
    return limit if limit and limit > 0 else None
