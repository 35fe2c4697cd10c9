"""The spans of a request, as a collector receives them: one trace from the client to the pods."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from structlog.testing import capture_logs

from router.decision import Direct, Plan, Split
from router.errors import UpstreamError
from router.observe import spans
from router.observe.receipts import receipt
from router.observe.spans import CLOSE_S, SpanExport
from router.observe.tracing import Tracing
from router.phases import PHASES
from router.request.context import RequestContext
from router.request.endings import ended_of
from router.request.inbound import HeaderList, first_values
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scripted_pods import LONGER_S, Client, Town, town
from tests.otlp_receiver import Collector, attributes, collecting
from tests.proxy.test_kv_transfer import PARAMS, answer, resetting, saying

pytestmark = [pytest.mark.net, pytest.mark.anyio]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS: HeaderList = [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), (b"tracestate", b"a=1")]
OFFERING, ANSWERING = saying(answer("h", kv_transfer_params=PARAMS)), saying(answer(cached_tokens=16))
SECRET = "the words of the client"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """However slow this machine is, it receives the last spans. No export goes on, and is logged, in a later test."""
    monkeypatch.setattr(spans, "CLOSE_S", LONGER_S)
    with collecting() as collector:
        yield collector
    for thread in threading.enumerate():
        if "shut_down" in thread.name:
            thread.join(LONGER_S)


@asynccontextmanager
async def tracing_to(url: str, **settings: Any) -> AsyncIterator[Tracing]:
    """A tracing that is closed at the end, which exports what is left."""
    tracing = Tracing(SpanExport(url), **{"sample_share": 1.0, "max_per_s": 1000, **settings})
    try:
        yield tracing
    finally:
        await tracing.sink.close()


def traced(pods: Town, tracing: Tracing, *plans: Plan, headers: HeaderList = HEADERS) -> RequestContext:
    """A request as the edge makes it."""
    messages = [{"role": "user", "content": SECRET}]
    context = pods.context(*plans, headers=[*headers, (b"content-type", b"application/json")], messages=messages)
    trace = tracing.begin(headers, first_values(headers))
    trace.phases = context.phases
    context.head = replace(context.head, trace=trace)
    return context


async def serve(pods: Town, context: RequestContext) -> Client:
    """Serve a request as it was decided."""
    try:
        return await pods.serve(context)
    finally:
        pods.core.endings.end(context)


def hex_of(span: Span) -> tuple[str, str, str]:
    return span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()


def context_at(pods: Town, name: str) -> str:
    """The traceparent that this pod received."""
    found: str = pods.made[name].asked[0].headers["traceparent"]
    return found


async def test_one_trace_has_the_client_the_router_and_both_pods_of_a_split(collector: Collector) -> None:
    """The parent of what a pod does is the router's request to it."""
    async with asyncio.timeout(DEADLINE_S), tracing_to(collector.url) as tracing, town(p=OFFERING, d=ANSWERING) as pods:
        client = await serve(pods, traced(pods, tracing, Split(pods.pod("p"), pods.pod("d"))))
        sent = {name: context_at(pods, name) for name in "pd"}
        assert pods.made["p"].asked[0].headers["tracestate"] == "a=1"
    request = collector.named("chat m")
    assert hex_of(request) == (TRACE, request.span_id.hex(), SPAN)
    assert client.header(b"traceparent").decode() == f"00-{TRACE}-{request.span_id.hex()}-01"
    for name, span_name in (("p", "prefill chat m"), ("d", "decode chat m")):
        leg = collector.named(span_name)
        assert hex_of(leg) == (TRACE, leg.span_id.hex(), request.span_id.hex())
        assert sent[name] == f"00-{TRACE}-{leg.span_id.hex()}-01"
        assert leg.kind == Span.SPAN_KIND_CLIENT and attributes(leg.attributes)["warmroute.pod"] == name
    assert collector.named("prefill chat m").end_time_unix_nano <= collector.named("decode chat m").start_time_unix_nano


async def test_the_phases_are_consecutive_spans_of_the_request(collector: Collector) -> None:
    """With the seven names, at the time of day."""
    before_ns = time.time_ns()
    async with asyncio.timeout(DEADLINE_S), tracing_to(collector.url) as tracing, town(a=ANSWERING) as pods:
        await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("a"))), Client())
    request = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    phases = [span for span in collector.spans if span.kind == Span.SPAN_KIND_INTERNAL]
    assert [span.name for span in phases] == list(PHASES)
    assert {span.parent_span_id for span in phases} == {request.span_id}
    assert before_ns <= request.start_time_unix_nano == phases[0].start_time_unix_nano
    assert [span.end_time_unix_nano for span in phases[:-1]] == [span.start_time_unix_nano for span in phases[1:]]
    assert phases[-1].end_time_unix_nano == request.end_time_unix_nano <= time.time_ns()
    [leg] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    assert phases[4].start_time_unix_nano <= leg.start_time_unix_nano <= leg.end_time_unix_nano


async def test_attributes_follow_the_conventions_and_have_no_text_of_the_client(collector: Collector) -> None:
    async with asyncio.timeout(DEADLINE_S), tracing_to(collector.url) as tracing, town(a=ANSWERING) as pods:
        await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("a"))), Client())
        address = pods.pod("a").url.removeprefix("http://")
    server = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    found = attributes(server.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "http.response.status_code": 200,
        "warmroute.request_id": "req-1",
        "warmroute.pod": "a",
        "warmroute.result": "ok",
    }
    assert expected.items() <= found.items()
    [leg] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    to_pod = attributes(leg.attributes)
    assert f"{to_pod['server.address']}:{to_pod['server.port']}" == address
    assert to_pod["gen_ai.provider.name"] == "vllm"
    assert collector.resources[0]["service.name"] == "warmroute"
    assert set(collector.paths) == {"/v1/traces"}
    assert not any(SECRET.encode() in span.SerializeToString() for span in collector.spans)


async def test_a_retry_is_a_second_request_in_the_same_trace(collector: Collector) -> None:
    """The failed attempt says which pod failed, and how."""
    async with (
        asyncio.timeout(DEADLINE_S),
        tracing_to(collector.url) as tracing,
        town(bad=resetting, good=ANSWERING) as pods,
    ):
        plans = (Direct(pods.pod("bad")), Direct(pods.pod("good")))
        await serve(pods, traced(pods, tracing, *plans))
        sent = [context_at(pods, name) for name in ("bad", "good")]
    legs = [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    assert [f"00-{TRACE}-{leg.span_id.hex()}-01" for leg in legs] == sent
    assert [attributes(leg.attributes).get("error.type") for leg in legs] == ["upstream_broken", None]
    attempts = [span for span in collector.spans if span.name == "attempt"]
    assert [attributes(span.attributes).get("warmroute.pod") for span in attempts] == ["bad", None]
    server = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    assert attributes(server.attributes)["warmroute.tries"] == 2
    assert server.status.code == 0


async def test_a_failed_request_is_an_error_and_ends_its_spans(collector: Collector) -> None:
    async with asyncio.timeout(DEADLINE_S), tracing_to(collector.url) as tracing, town(bad=resetting) as pods:
        with pytest.raises(UpstreamError):
            await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("bad"))), Client())
    server = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    assert server.status.code == 2
    assert attributes(server.attributes)["error.type"] == "upstream_broken"
    assert "relay" not in [span.name for span in collector.spans]


async def test_the_trace_id_is_in_the_log_and_the_receipt(collector: Collector) -> None:
    """Also of a request that is not recorded."""
    async with asyncio.timeout(DEADLINE_S), tracing_to(collector.url) as tracing, town(a=ANSWERING) as pods:
        unsampled = [(b"traceparent", f"00-{TRACE}-{SPAN}-00".encode())]
        context = traced(pods, tracing, Direct(pods.pod("a")), headers=unsampled)
        await pods.forwarder.forward(context, Client())
        assert receipt(ended_of(context, "settle", None, 0.0, 0.0)).trace_id == TRACE
        assert json.loads(pods.log_lines[0])["trace_id"] == TRACE
        assert context_at(pods, "a") == f"00-{TRACE}-{SPAN}-00"
    assert not collector.spans


@pytest.mark.parametrize("kind", ["absent", "failing", "silent"])
async def test_a_dead_collector_costs_no_request(
    collector: Collector, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is bounded, and the router stops in time."""
    monkeypatch.setattr(spans, "CLOSE_S", CLOSE_S / 10)
    url = collector.url
    if kind == "absent":
        url = "http://127.0.0.1:9"
    elif kind == "failing":
        collector.status = 400
    else:
        collector.silent.set()
    with capture_logs() as lines:
        async with asyncio.timeout(LONGER_S) as limit, town(a=ANSWERING) as pods, tracing_to(url) as tracing:
            for _ in range(300):
                client = Client()
                await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("a"))), client)
                assert client.status == 200
            limit.reschedule(asyncio.get_running_loop().time() + DEADLINE_S)
    assert not collector.spans
    assert len([line for line in lines if line["event"] == "traces cannot be exported"]) <= 1


async def test_a_collector_that_returns_is_sent_new_spans(collector: Collector) -> None:
    """The loss is logged once."""
    collector.status = 400
    with capture_logs() as lines:
        async with asyncio.timeout(LONGER_S), town(a=ANSWERING) as pods, tracing_to(collector.url) as tracing:
            while not lines:
                await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("a"))), Client())
            collector.status = 200
            while len(lines) == 1:
                await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("a"))), Client())
    assert [line["event"] for line in lines] == ["traces cannot be exported", "traces are exported again"]


async def test_the_resource_is_that_of_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for every OpenTelemetry SDK."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front door")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=router-0")
    async with asyncio.timeout(DEADLINE_S), town(a=ANSWERING) as pods:
        tracing = Tracing(SpanExport(None), sample_share=1.0, max_per_s=10)
        await pods.forwarder.forward(traced(pods, tracing, Direct(pods.pod("a"))), Client())
        await tracing.sink.close()
    found = collector.resources[0]
    assert (found["service.name"], found["k8s.pod.name"]) == ("front door", "router-0")
