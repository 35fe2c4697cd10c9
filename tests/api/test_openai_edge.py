"""The edge refuses requests, checks large bodies and forms, and answers errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from router.admission.gate import AdmissionGate
from router.admission.names import ModelName, Names, NamesInUse
from router.admission.tenant import OPEN_TENANT, Admitted
from router.config.schema import Edge, Limits
from router.errors import (
    BodyTooLarge,
    HeadersTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    NoReadyPod,
    RouterError,
    Saturated,
    UnknownModel,
    UnsupportedEncoding,
    UpstreamBroken,
    UpstreamError,
)
from router.frontends.fair_turns import MAX_AT_ONCE
from router.frontends.http.exchange import Exchange
from router.frontends.http.http_edge import AnyExchange
from router.frontends.http.openai_edge import OpenAiEdge
from router.request.context import RequestContext
from router.request.inbound import Head, HeaderList, first_values
from router.request.parse import BodyParser
from router.request.reading import RequestReader
from router.types import Endpoint, InferenceRequest, Pod
from tests.api.edges import edge_of
from tests.kit.cores import CoreOfPods
from tests.kit.deadlines import DEADLINE_S
from tests.request.test_reading import CHAT, FORWARDED, OTHER_POD, POD, Headers

Forward = Callable[[RequestContext, Exchange], Awaitable[None]]


class Forwarder:
    def __init__(self, forward: Forward) -> None:
        self.forward = forward


async def answer_nothing(_context: RequestContext, _client: Exchange) -> None:
    """A forwarder that leaves the response to the test."""


def make_edge(
    *pods: Pod,
    edge: Edge | None = None,
    limits: Limits | None = None,
    forward: Forward = answer_nothing,
    configured: frozenset[str] = frozenset(),
    core: CoreOfPods | None = None,
    gate: AdmissionGate | None = None,
    names: Names | None = None,
) -> OpenAiEdge:
    core, edge, limits = core or CoreOfPods([]), edge or Edge(), limits or Limits()
    core.fleet.sync(pods or [POD])
    reader = RequestReader(core.fleet, edge, limits.max_messages, configured, NamesInUse(names) if names else None)
    return edge_of(core, Forwarder(forward), edge=edge, limits=limits, reader=reader, gate=gate)


def head_of(edge: OpenAiEdge, path: str = "/v1/rerank", method: str = "POST", headers: Headers = ()) -> Head:
    """The head of a request, as `EdgeProtocol` builds it."""
    listed, named = list(headers), first_values(list(headers))
    request_id, given_id, trace = edge.identity(listed, named)
    return Head(
        id=request_id,
        method=method,
        target=path.encode(),
        headers=listed,
        path=path,
        named=named,
        methods=edge.methods(path),
        peer="127.0.0.1",
        given_id=given_id,
        trace=trace,
    )


def refusal_of(edge: OpenAiEdge, path: str = "/v1/rerank", method: str = "POST", headers: Headers = ()) -> Any:
    """Why it refuses a request by its head."""
    return edge.admit(head_of(edge, path, method, headers), 0.0)[1]


def counted(core: CoreOfPods, endpoint: Endpoint, result: str, model: str = "") -> float:
    """The requests of the metric with this result."""
    return core.counted("warmroute_requests_total", endpoint=endpoint.value, model=model, result=result)


# --- large bodies ---


@pytest.mark.anyio
async def test_a_body_with_too_many_items_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding it would hold the event loop."""
    monkeypatch.setattr(BodyParser, "parse", lambda *_, **__: pytest.fail("decoded"))
    body = b'{"model":"m","messages":[' + b"{}," * 2_000 + b"{}]}"
    core = CoreOfPods([])
    edge, client = make_edge(limits=Limits(max_json_items=1_024), core=core), Client(body, path="/v1/chat/completions")
    await edge.serve(client.sent_to(edge))
    assert client.status == 400 and b"limits.max_json_items" in client.sent
    assert counted(core, Endpoint.CHAT, "malformed_request") == 1


@pytest.mark.anyio
async def test_a_previewed_body_is_checked_as_a_sent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may preview what a client has sent."""
    monkeypatch.setattr(BodyParser, "parse", lambda *_, **__: pytest.fail("decoded"))
    body = b'{"model":"m","messages":[' + b"{}," * 2_000 + b"{}]}"
    with pytest.raises(MalformedRequest, match=r"limits\.max_json_items"):
        await make_edge(limits=Limits(max_json_items=1_024)).read(Endpoint.CHAT, {}, body, "r", OPEN_TENANT)


FORM = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n{}\r\n--b--\r\n'


MULTIPART = (b"content-type", b"multipart/form-data; boundary=b")
URLENCODED = (b"content-type", b"application/x-www-form-urlencoded")


@pytest.mark.parametrize(
    ("path", "header", "body"),
    [
        ("/v1/audio/transcriptions", MULTIPART, FORM % b"vllm_xargs"),
        ("/v1/audio/transcriptions", MULTIPART, FORM % b"priority"),
        ("/v1/audio/transcriptions", URLENCODED, b"a=1"),
        ("/v1/rerank", MULTIPART, json.dumps(FORWARDED).encode()),
        ("/v1/rerank", URLENCODED, json.dumps(FORWARDED).encode()),
        ("/v1/chat/completions", MULTIPART, json.dumps(CHAT).encode()),
        ("/v1/chat/completions", URLENCODED, json.dumps(CHAT).encode()),
        ("/v1/embeddings", MULTIPART, b'{"model":"m","input":"a"}'),
    ],
)
def test_forms_that_might_steer_an_engine_are_refused(path: str, header: tuple[bytes, bytes], body: bytes) -> None:
    """Also JSON that is declared as a form. The forms of a trusted client are left unread."""
    forwarded: list[bytes] = []

    async def forward(context: RequestContext, _client: Exchange) -> None:
        forwarded.append(context.request.body)

    client = Client(body, path=path, headers=[header])
    assert served(make_edge(forward=forward), client).status == 400
    assert not forwarded
    trusting = make_edge(edge=Edge(trust_engine_fields=True), forward=forward)
    served(trusting, client)
    assert forwarded == [body]


def test_the_form_of_a_name_is_forwarded_with_its_model() -> None:
    forwarded: list[InferenceRequest] = []

    async def forward(context: RequestContext, _client: Exchange) -> None:
        forwarded.append(context.request)

    form, names = FORM % b"model", Names({"whisper-1": ModelName("whisper-1", {"m": 1.0})})
    sent = form.replace(b"{}", b"whisper-1")
    served(make_edge(names=names, forward=forward), Client(sent, path="/v1/audio/transcriptions", headers=[MULTIPART]))
    (request,) = forwarded
    assert (request.model, request.name, request.body) == ("m", "whisper-1", form.replace(b"{}", b"m"))


def test_other_forms_are_forwarded_unchanged() -> None:
    forwarded: list[bytes] = []

    async def forward(context: RequestContext, _client: Exchange) -> None:
        forwarded.append(context.request.body)

    client = Client(FORM % b"prompt", path="/v1/audio/transcriptions", headers=[MULTIPART])
    served(make_edge(forward=forward), client)
    assert forwarded[0] is client.body


@pytest.mark.parametrize("trusted", [False, True])
def test_a_form_is_routed_by_its_model(trusted: bool) -> None:
    """Where several are served, also by the name of an adapter; an unknown one is a 404, and none a 400."""
    routed: list[tuple[str, str]] = []

    async def forward(context: RequestContext, _client: Exchange) -> None:
        routed.append((context.request.model, context.request.adapter))

    edge = make_edge(POD, OTHER_POD, forward=forward, edge=Edge(trust_engine_fields=trusted))

    def send(field: bytes, value: bytes) -> Client:
        body = (FORM % field).replace(b"{}", value)
        return served(edge, Client(body, path="/v1/audio/transcriptions", headers=[MULTIPART]))

    for name in (b"m", b"lora"):
        send(b"model", name)
    assert routed == [("m", ""), ("m", "lora")]
    assert send(b"model", b"gone").status == 404
    assert send(b"prompt", b"m").status == 400


def test_several_content_types_are_refused() -> None:
    """An engine might read another one than the router."""
    several = [(b"content-type", b"application/json"), MULTIPART]
    assert isinstance(refusal_of(make_edge(), headers=several), MalformedRequest)
    assert refusal_of(make_edge(), headers=[MULTIPART, (b"x", b"1"), (b"x", b"2")]) is None


# --- refusals ---


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("GET", "/v1/chat/completions", True),
        ("GET", "/v1/messages", True),
        ("GET", "/v1/responses/resp_1", False),
        ("POST", "/v1/responses/resp_1", True),
        ("GET", "/tokenizer_info", False),
        ("TRACE", "/tokenizer_info", True),
        ("GET", "/tokenize", True),
        ("POST", "/tokenize", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
def test_which_methods_are_refused(method: str, path: str, refused: bool) -> None:
    """Inference is POST; the operator's paths have the usual methods."""
    refusal = refusal_of(make_edge(edge=Edge(extra_paths=("/tokenizer_info",))), path, method)
    assert isinstance(refusal, MethodNotAllowed) if refused else refusal is None


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ([(b"content-length", b"100")], None),
        ([(b"content-length", b"101")], BodyTooLarge),
        ([(b"content-length", b"-101")], None),
        ([(b"a", b"x" * 1023)], None),
        ([(b"a", b"x" * 1024)], HeadersTooLarge),
        ([(b"a", b"x" * 511), (b"b", b"x" * 512)], HeadersTooLarge),
        ([(b"content-encoding", b"gzip")], None),
        ([(b"content-encoding", b"Zstd")], None),
        ([(b"content-encoding", b"identity")], None),
        ([(b"content-encoding", b"br")], UnsupportedEncoding),
        ([(b"content-encoding", b"gzip, gzip")], UnsupportedEncoding),
        ([(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")], UnsupportedEncoding),
    ],
)
def test_requests_are_refused_by_their_headers(headers: Headers, refusal: type[RouterError] | None) -> None:
    """Before the body is read; sizes at the limit are accepted."""
    edge = make_edge(limits=Limits(max_body_bytes=100, max_header_bytes=1024))
    assert type(refusal_of(edge, headers=headers)) is (refusal or type(None))


def test_a_refusal_is_answered_and_counted() -> None:
    """Before anything of the request is parsed."""
    core, client = CoreOfPods([]), Client(b"not JSON", path="/v1/completions")
    client.refusal = BodyTooLarge("too large")
    assert served(make_edge(core=core), client).status == 413
    assert counted(core, Endpoint.COMPLETIONS, "body_too_large") == 1


def test_a_configured_model_that_no_pod_serves_is_counted_under_its_name() -> None:
    """An alert for one model sees it; names that clients invent make no series."""
    core = CoreOfPods([])
    edge = make_edge(configured=frozenset({"late"}), core=core)
    for model, error in (("late", NoReadyPod), ("invented", UnknownModel)):
        client = served(edge, Client(json.dumps({"model": model}).encode()))
        assert client.status == error.http_status
    assert counted(core, Endpoint.OTHER, "no_ready_pod", "late") == 1
    assert counted(core, Endpoint.OTHER, "model_not_found") == 1


def test_requests_that_are_never_routed_have_a_line_in_the_log() -> None:
    """Refused, abandoned, and not parsed: with the status and the code of the response."""
    core = CoreOfPods([])
    edge = make_edge(core=core)
    served(edge, Client(b'{"model": "' + b"n" * 5000 + b'"}', headers=[(b"x-request-id", b"r")]))
    edge.abandoned(Client(path="/v1/embeddings").sent_to(edge))
    edge.standalone_error(Saturated("full"))
    refused, left, unparsed = map(json.loads, core.log_lines)
    assert len(refused.pop("error")) < 600
    for line in (refused, left, unparsed):
        assert line.pop("event") == "request" and line.pop("timestamp") and line.pop("level") == "info"
    assert refused == {"id": "r", "endpoint": "other", "status": 404, "result": "model_not_found"}
    assert left == {"endpoint": "/v1/embeddings", "result": "client_gone"}
    assert unparsed == {"endpoint": "other", "status": 503, "result": "saturated", "error": "full"}


def test_abandoned_requests_are_counted_by_endpoint() -> None:
    """Clients that left before they were served."""
    core = CoreOfPods([])
    edge = make_edge(core=core)
    for path in ("/v1/embeddings", "/v1/rerank"):
        edge.abandoned(Client(path=path).sent_to(edge))
    assert counted(core, Endpoint.EMBEDDINGS, "client_gone") == counted(core, Endpoint.OTHER, "client_gone") == 1


def test_a_standalone_error_ends_the_connection() -> None:
    """A whole HTTP response."""
    core = CoreOfPods([])
    edge = make_edge(core=core)
    head, _, body = edge.standalone_error(Saturated("full")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert head.endswith(b"\r\nconnection: close") and b"retry-after: 1" in head
    assert json.loads(body)["error"]["message"] == "full"
    assert counted(core, Endpoint.OTHER, "saturated") == 1


# --- errors while serving ---


class Client:
    """Records the response in place of an `Exchange`."""

    sees_response = True

    def __init__(
        self, body: bytes = json.dumps(FORWARDED).encode(), *, path: str = "/v1/rerank", headers: Headers = ()
    ) -> None:
        self.body = body
        self.admitted = Admitted()
        self.refusal: RouterError | None = None
        self.kept_open = False
        self.is_plain = self.started = self.response_complete = self.disconnected = self.sends_events = False
        self.status, self.headers, self.sent = 0, dict[bytes, bytes](), b""
        self._asked = path, "POST", headers

    def sent_to(self, edge: OpenAiEdge, **changed: Any) -> AnyExchange:
        """Itself, with a head for this edge."""
        self.head = replace(head_of(edge, *self._asked), **changed)
        return cast(AnyExchange, self)

    def start(self, status: int, headers: HeaderList) -> None:
        self.started, self.status, self.headers = True, status, dict(headers)

    def put(self, piece: bytes) -> bool:
        self.sent += piece
        return True

    def finish(self) -> None:
        self.response_complete = True


def served(edge: OpenAiEdge, client: Client, **changed: Any) -> Client:
    """`changed`: fields of its head."""
    asyncio.run(edge.serve(client.sent_to(edge, **changed)))
    return client


def failing(error: BaseException, *, stream: bool | None = None) -> Forward:
    """A forwarder that fails; with `stream` given, after the response began."""

    async def forward(_context: RequestContext, client: Exchange) -> None:
        if stream is not None:
            client.start(200, [])
            cast(Any, client).sends_events = stream
        raise error

    return forward


def test_an_error_is_answered_with_its_status_and_the_request_id() -> None:
    """The client's id, or one that the router makes."""
    edge = make_edge(forward=failing(Saturated("full")))
    client = served(edge, Client(headers=[(b"x-request-id", b"mine")]))
    assert (client.status, client.headers[b"x-request-id"], client.response_complete) == (503, b"mine", True)
    assert json.loads(client.sent)["error"]["code"] == "saturated"
    first, second = (served(edge, Client()).headers[b"x-request-id"] for _ in range(2))
    assert first.startswith(b"req-") and first != second


@pytest.mark.parametrize(("error", "status", "logged"), [(Saturated("full"), 503, []), (KeyError("x"), 500, ["mine"])])
def test_only_a_mistake_of_the_router_is_logged_with_its_traceback(
    error: Exception, status: int, logged: list[str]
) -> None:
    with capture_logs() as lines:
        client = served(make_edge(forward=failing(error)), Client(headers=[(b"x-request-id", b"mine")]))
    assert client.status == status
    assert [line["request_id"] for line in lines if line["event"] == "request failed" and line["exc_info"]] == logged


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        (b"5f1c2d3e-4a5b-6c7d-8e9f-0a1b2c3d4e5f", True),
        (b"a.b_c-D9", True),
        (b"a" * 128, True),
        (b"a" * 129, False),
        (b"___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_x", False),
        (b"a___b", False),
        (b"a b", False),
        (b"a/b", False),
        (b"caf\xe9", False),
        (b"", False),
    ],
)
def test_a_request_id_is_kept_only_if_it_is_harmless(given: bytes, is_kept: bool) -> None:
    """Pod and response get the same id; a replaced one is kept, cut, for the log."""
    heads = []

    async def forward(context: RequestContext, _client: Exchange) -> None:
        heads.append(context.head)
        raise Saturated("full")

    client = served(make_edge(forward=forward), Client(headers=[(b"x-request-id", given)]))
    assert client.headers[b"x-request-id"] == heads[0].id.encode()
    assert (heads[0].id == given.decode("latin-1")) is is_kept
    assert heads[0].given_id == ("" if is_kept else given[:128].decode("latin-1"))


def test_a_request_uses_the_share_of_its_owner() -> None:
    owners = []

    async def forward(context: RequestContext, _client: Exchange) -> None:
        owners.append(context.owner)
        raise Saturated("full")

    client = Client(headers=[(b"x-tenant", b"another")])
    client.admitted = Admitted("192.0.2.0")
    served(make_edge(forward=forward), client)
    assert owners == ["192.0.2.0"]


def test_an_unexpected_error_is_answered_without_details() -> None:
    """500."""
    client = served(make_edge(forward=failing(ValueError("secret"))), Client())
    assert client.status == 500 and b"secret" not in client.sent


@pytest.mark.parametrize(
    ("error", "stream", "is_told"),
    [
        (UpstreamBroken("lost"), True, True),
        (UpstreamBroken("lost"), False, False),
        (ValueError("secret"), True, False),
    ],
)
def test_a_broken_stream_ends_with_an_error_event(error: Exception, stream: bool, is_told: bool) -> None:
    """Any other response that began is cut off."""
    client = served(make_edge(forward=failing(error, stream=stream)), Client())
    assert client.status == 200 and (b"upstream_broken" in client.sent) is is_told


@pytest.mark.parametrize("route_headers", [True, False])
@pytest.mark.parametrize(
    ("kind", "stream"),
    [(NoReadyPod, None), *((kind, stream) for kind in UpstreamError.__subclasses__() for stream in (None, True))],
)
def test_errors_name_pods_only_where_route_headers_do(
    kind: type[RouterError], route_headers: bool, stream: bool | None
) -> None:
    """Before the response and in the middle of a stream."""
    forward = failing(kind("pod 10.1.2.3:8000: lost"), stream=stream)
    client = served(make_edge(edge=Edge(route_headers=route_headers), forward=forward), Client())
    error = json.loads(client.sent.strip().removeprefix(b"event: error\ndata: "))["error"]
    assert ("10.1.2.3" in error["message"]) is route_headers
    assert error["message"] and error["code"] == kind.code


@pytest.mark.parametrize(("disconnected", "status"), [(False, 503), (True, 0)])
def test_a_cancelled_request_is_told_that_the_router_stops(disconnected: bool, status: int) -> None:
    """Unless its client has left."""
    client = Client()
    client.disconnected = disconnected
    with pytest.raises(asyncio.CancelledError):
        served(make_edge(forward=failing(asyncio.CancelledError())), client)
    assert client.status == status


def test_requests_beyond_the_limit_are_refused_until_others_end() -> None:
    """`limits.max_in_flight`."""

    async def story() -> None:
        go_on = asyncio.Event()

        async def wait(_context: RequestContext, _client: Exchange) -> None:
            await go_on.wait()

        edge = make_edge(limits=Limits(max_in_flight=1), forward=wait)
        first, second, third = Client(), Client(), Client()
        running = asyncio.create_task(edge.serve(first.sent_to(edge)))
        await asyncio.sleep(0)
        await edge.serve(second.sent_to(edge))
        assert (first.status, second.status) == (0, 503) and b"max_in_flight" in second.sent
        go_on.set()
        await running
        await edge.serve(third.sent_to(edge))
        assert third.status == 0

    asyncio.run(story())


@pytest.mark.parametrize("others_run", [False, True])
def test_a_burst_of_one_owner_does_not_begin_in_one_pass(others_run: bool) -> None:
    """Forty requests in one pass of the event loop would delay all that arrive meanwhile by up to 40 ms."""
    begun: list[str] = []

    async def story() -> None:
        go_on = asyncio.Event()

        async def wait(context: RequestContext, _client: Exchange) -> None:
            begun.append(context.request.id)
            await go_on.wait()

        edge = make_edge(forward=wait)

        def sent(owner: str) -> asyncio.Task[None]:
            client = Client(headers=[(b"x-request-id", owner.encode())])
            client.admitted = Admitted(owner)
            return asyncio.create_task(edge.serve(client.sent_to(edge)))

        running = [sent("other")] if others_run else []
        await asyncio.sleep(0)
        running += [sent("many") for _ in range(40)]
        await asyncio.sleep(0)
        running.append(sent("few"))
        while len(begun) < len(running):
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert begun.count("many") == 40
    assert begun.index("few") <= MAX_AT_ONCE + 2
