"""How do clients speak to the router?

The `/v1` endpoints as raw ASGI: read the body once, parse it once, hand it to the forwarder, relay what comes back. A
client that leaves cancels its story in whatever phase it is. This file never chooses a pod.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog

from router.api.errors import error_body, shape_of
from router.api.parse import model_of, parse_body, prompt_fields, steers_engines, without_engine_fields
from router.config.schema import Edge
from router.errors import (
    BodyTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    NoReadyPod,
    RouterError,
    UnknownModel,
    UpstreamError,
)
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.observe.phase import Phases
from router.proxy.downstream import Inbound
from router.proxy.forward import Forwarder
from router.proxy.headers import HeaderList, header
from router.proxy.relay import end_broken_stream, is_stream
from router.proxy.story import Story
from router.types import Endpoint, InferenceRequest

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_READ = {endpoint.value: endpoint for endpoint in Endpoint if endpoint is not Endpoint.OTHER}
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})

log = structlog.get_logger()


class AsgiDownstream:
    """The client's side of one exchange."""

    def __init__(self, send: AsgiSend) -> None:
        self._send = send
        self.started = False
        self.finished = False
        self.streams = False

    async def start(self, status: int, headers: HeaderList) -> None:
        self.started = True
        self.streams = is_stream(headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self) -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class OpenAiEdge:
    """The ASGI application of everything that goes on to a pod."""

    def __init__(
        self,
        forwarder: Forwarder,
        fleet: Fleet,
        metrics: Metrics,
        edge: Edge,
        max_body_bytes: int,
        configured: frozenset[str],
    ) -> None:
        self._forwarder = forwarder
        self._fleet = fleet
        self._metrics = metrics
        self._edge = edge
        self._max_body_bytes = max_body_bytes
        self._configured = configured
        self._session_header = edge.session_header.lower().encode()
        self._tenant_header = edge.tenant_header.lower().encode()

    def takes(self, method: str, path: str) -> bool:
        """Is this path the pods' business?"""
        if path == "/v1/models" or path.startswith("/v1/models/"):
            return False
        return path.startswith("/v1/") or (method == "POST" and path in self._edge.extra_paths)

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        client = AsgiDownstream(send)
        request_id = header(scope["headers"], b"x-request-id") or f"req-{uuid.uuid4().hex}"
        try:
            story = await self.admit(scope, receive, request_id)
            if story is not None:
                await self._serve_until_gone(story, client, receive)
        except RouterError as error:
            await self._fail(client, error, request_id)
        except Exception as error:
            log.exception("request failed", request_id=request_id)
            await self._fail(client, error, request_id)

    async def admit(self, scope: AsgiScope, receive: AsgiReceive, request_id: str) -> Story | None:
        """Read and check the request; None when the client left meanwhile. Raises `ClientError`."""
        phases = Phases()
        phases.enter("admit")
        endpoint = _READ.get(scope["path"], Endpoint.OTHER)
        headers: HeaderList = list(scope["headers"])
        try:
            if scope["method"] not in _METHODS or (endpoint is not Endpoint.OTHER and scope["method"] != "POST"):
                raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
            body = await read_body(receive, headers, self._max_body_bytes)
            return None if body is None else Story(self._inbound(scope, endpoint, headers, body, request_id), phases)
        except RouterError as error:
            self._metrics.requests.labels(endpoint.value, "", type(error).__name__).inc()
            raise

    async def _serve_until_gone(self, story: Story, client: AsgiDownstream, receive: AsgiReceive) -> None:
        """Forward, and cancel the forwarding at once when the client closes its connection."""
        forwarding = asyncio.ensure_future(self._forwarder.forward(story, client))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((forwarding, gone), return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            gone.cancel()
            if not forwarding.done():
                forwarding.cancel()
                await asyncio.wait((forwarding,))

    async def _fail(self, client: AsgiDownstream, error: Exception, request_id: str) -> None:
        body = error_body(error)
        if client.started:
            if client.streams and not client.finished and isinstance(error, UpstreamError):
                await end_broken_stream(client, body)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id.encode("latin-1", "replace")),
        ]
        await client.start(shape_of(error).status, headers)
        await client.write(body)
        await client.finish()

    def _inbound(
        self, scope: AsgiScope, endpoint: Endpoint, headers: HeaderList, body: bytes, request_id: str
    ) -> Inbound:
        build = self._pass_through if endpoint is Endpoint.OTHER else self._inference
        query = scope["query_string"]
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        return Inbound(
            request=build(endpoint, headers, body, request_id),
            method=scope["method"],
            target=raw_path.split(b"?")[0] + (b"?" + query if query else b""),
            headers=headers,
            peer=(scope.get("client") or ("", 0))[0],
        )

    def _inference(self, endpoint: Endpoint, headers: HeaderList, body: bytes, request_id: str) -> InferenceRequest:
        parsed = parse_body(endpoint, body)
        base, adapter = self._resolve(parsed.model)
        if not self._edge.trust_engine_fields and steers_engines(parsed):
            body = without_engine_fields(body)
        return InferenceRequest(
            id=request_id,
            endpoint=endpoint,
            model=base,
            adapter=adapter,
            body=body,
            stream=bool(getattr(parsed, "stream", False)),
            tenant=header(headers, self._tenant_header),
            session=header(headers, self._session_header) or getattr(parsed, "session_id", None) or "",
            salt=getattr(parsed, "cache_salt", None) or "",
            max_output_tokens=_max_output_tokens(parsed),
            prompt=prompt_fields(endpoint, parsed),
        )

    def _pass_through(self, endpoint: Endpoint, headers: HeaderList, body: bytes, request_id: str) -> InferenceRequest:
        """A path that the router does not read: it only needs to know the model."""
        model = model_of(body) or self._only_model()
        base, adapter = self._resolve(model)
        if not self._edge.trust_engine_fields and body.lstrip()[:1] == b"{":
            body = without_engine_fields(body)
        return InferenceRequest(
            id=request_id,
            endpoint=endpoint,
            model=base,
            adapter=adapter,
            body=body,
            session=header(headers, self._session_header),
        )

    def _resolve(self, model: str) -> tuple[str, str]:
        found = self._fleet.resolve(model)
        if found is None and model in self._configured:
            raise NoReadyPod(f"No pod that serves `{model}` has come up yet.")
        if found is None:
            raise UnknownModel(f"The model `{model}` does not exist.", param="model")
        return found

    def _only_model(self) -> str:
        served = {model for status in self._fleet.snapshot.pods for model in status.pod.models}
        if len(served) != 1:
            raise MalformedRequest("Name the `model` in a JSON body: several are served here.", param="model")
        return served.pop()


async def read_body(receive: AsgiReceive, headers: HeaderList, max_bytes: int) -> bytes | None:
    """The whole body, or None when the client left. Raises `BodyTooLarge` before more than `max_bytes` are held."""
    declared = header(headers, b"content-length")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(f"The body has {declared} bytes; at most {max_bytes} are taken.")
    if header(headers, b"content-encoding") not in ("", "identity"):
        raise MalformedRequest("Send the body without content-encoding.")
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise BodyTooLarge(f"The body is larger than the {max_bytes} bytes that are taken.")
        pieces.append(piece)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _disconnected(receive: AsgiReceive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _max_output_tokens(parsed: Any) -> int | None:
    limit = getattr(parsed, "max_completion_tokens", None) or getattr(parsed, "max_tokens", None)
    return limit if limit and limit > 0 else None
