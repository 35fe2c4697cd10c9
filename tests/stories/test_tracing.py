"""Traces of a router, from the client's socket to the collector's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from router.config.schema import TracingConfig
from router.errors import ConfigError
from router.phases import PHASES
from router.wiring.router import build_tracing
from tests.otlp_receiver import Collector, attributes, collecting
from tests.stories.conftest import Deploy
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def requests_of(collector: Collector) -> list[Span]:
    """The spans of clients' requests."""
    return [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]


async def test_a_client_finds_its_request_by_the_trace(
    deploy: Deploy, collector: Collector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the answer, the collector, the log, the receipts and explain."""
    tracing, receipts = TracingConfig(enabled=True, endpoint=collector.url, sample_share=0.0), tmp_path / "receipts"
    async with deploy(pods=1, tracing=tracing, receipts=receipts) as deployment:
        body = {"model": "demo", "messages": opening("rivers"), "max_tokens": 2}
        answer = await deployment.client.post("/v1/chat/completions", json=body, headers=PARENT)
        request_id = answer.headers["x-request-id"]
        explained = (await deployment.admin.get(f"/admin/explain/{request_id}")).json()
    [request] = requests_of(collector)
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert attributes(request.attributes)["warmroute.request_id"] == request_id
    assert [span.name for span in collector.spans if span.kind == Span.SPAN_KIND_INTERNAL] == list(PHASES)
    assert explained["receipt"]["trace_id"] == TRACE
    written = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [line["trace_id"] for line in written if line["kind"] == "receipt"] == [TRACE]
    [line] = [json.loads(text) for text in capsys.readouterr().err.splitlines() if '"event":"request"' in text]
    assert (line["trace_id"], line["id"]) == (TRACE, request_id)
    assert {"workload", "prompt_tokens", "output_tokens"} <= line.keys()


async def test_a_trace_that_begins_at_the_router_is_in_the_request_id(deploy: Deploy, collector: Collector) -> None:
    """A client that sends its own id keeps it; also errors name the trace."""
    tracing = TracingConfig(enabled=True, endpoint=collector.url, sample_share=1.0)
    async with deploy(pods=1, tracing=tracing) as deployment:
        answer = await deployment.chat(opening("hills"), max_tokens=2)
        unheard = {"model": "other", "messages": opening("hills")}
        refused = await deployment.client.post("/v1/chat/completions", json=unheard)
        own = await deployment.client.get("/v1/chat/completions", headers={"x-request-id": "mine"})
    assert own.headers["x-request-id"] == "mine"
    chat, unknown, wrong_method = requests_of(collector)
    assert answer.headers["x-request-id"] == f"req-{chat.trace_id.hex()}"
    assert refused.headers["x-request-id"] == f"req-{unknown.trace_id.hex()}"
    assert refused.headers["traceparent"] == f"00-{unknown.trace_id.hex()}-{unknown.span_id.hex()}-01"
    assert attributes(unknown.attributes)["warmroute.result"] == "model_not_found"
    assert attributes(unknown.attributes)["http.response.status_code"] == refused.status_code == 404
    assert attributes(wrong_method.attributes)["warmroute.request_id"] == "mine"
    assert unknown.status.code == 0, "the client's own mistake"


async def test_tracing_is_off_by_default(deploy: Deploy) -> None:
    """A client's context passes unchanged, and nothing is answered."""
    async with deploy(pods=1) as deployment:
        body = {"model": "demo", "messages": opening("lakes"), "max_tokens": 2}
        answer = await deployment.client.post("/v1/chat/completions", json=body, headers=PARENT)
    assert answer.status_code == 200
    assert "traceparent" not in answer.headers
    assert deployment.program.edges.tracing is None


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "router.observe.spans", None)
    with pytest.raises(ConfigError, match=r"`pip install '\.\[otel\]'` in the clone"):
        build_tracing(TracingConfig(enabled=True))


def test_a_wrong_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(ConfigError, match="OTEL_"):
        build_tracing(TracingConfig(enabled=True))
