"""What is known of a request afterwards: explanations, receipts, traces."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from structlog.testing import capture_logs

from helm.monitoring.metric_catalog import declarations_of
from loadtest.commands.simulate_setup import DEFAULT_FLEET, Source, experiment
from loadtest.simulator.compare import Setting
from router.cli import main
from router.cli.receipt_files import receipts_of
from router.cli.replay import choices
from router.config.schema import TracingConfig
from router.observe.declared import of_decisions, of_pods, of_requests
from router.observe.fast_metrics import MetricKind
from router.observe.receipts import Explained
from router.phases import PHASES
from router.policy.price import Choice
from router.policy.review import review
from tests.kit.scenes import POLICIES
from tests.otlp_receiver import Collector, attributes, collecting
from tests.stories.conftest import Chat, Deploy, Deployment, converse, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- explain, preview and replay ---


async def explain(deployment: Deployment, request_id: str) -> Explained:
    answer = await deployment.admin.get(f"/admin/explain/{request_id}")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Explained)


COUNTED = {
    one.series
    for chapter in (of_requests, of_decisions, of_pods)
    for one in declarations_of(chapter)
    if one.kind is not MetricKind.GAUGE and one is not of_pods.KV_EVENTS and "_placed_" not in one.series
}
"""Metrics that grow with requests alone, at once. Gauges follow pods and time. KV events, and what other placements
would have found, come after a response."""


async def counted(deployment: Deployment) -> dict[str, str]:
    """Samples of these metrics by name and labels."""
    lines = (await deployment.admin.get("/metrics")).text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = {name: name.partition("{")[0] for name in samples}
    return {
        name: value
        for name, value in samples.items()
        if names[name] in COUNTED or names[name].rpartition("_")[0] in COUNTED
    }


async def test_a_served_request_can_be_explained(deploy: Deploy) -> None:
    """By the id of its response: pods, the cost of each candidate, the prediction and the result."""
    async with deploy(pods=3) as deployment:
        *_, last = await converse(deployment, opening("tides"), turns=3)
        found = await explain(deployment, last.headers["x-request-id"])
        first, cached = found.explanation.columns[0], int(last.headers["x-warmroute-cached-tokens"])
        assert first.plan.choice == Choice(last.headers["x-warmroute-pod"])
        assert found.explanation.candidate_count == len(found.explanation.columns) == 3
        assert sum(ms for _, ms in first.plan.parts) == pytest.approx(first.plan.total_ms)
        reported = last.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (found.receipt.predicted_cached_tokens, found.receipt.cached_tokens) == (cached, reported)
        assert 0 < cached <= reported
        assert found.receipt.result == "ok" and set(found.receipt.phases_ms) >= {"admit", "decide", "relay"}
        assert "tides" not in msgspec.json.encode(found).decode()


async def test_a_preview_decides_and_changes_nothing(deploy: Deploy) -> None:
    """Nothing is sent, leased, counted or learned; the request then goes to the previewed pod."""
    async with deploy(pods=3) as deployment:
        for number in range(12):
            await deployment.chat(opening("harbour") if number == 5 else opening(f"boat {number}"))
        body = {"model": "demo", "messages": opening("harbour"), "max_tokens": 8}
        seen = deployment.program.core.decisions._prefixes
        counts = {name: [run.count for run in shared._runs.values()] for name, shared in seen.items()}
        before, blocks = await counted(deployment), [engine.load for engine in deployment.engines]
        previews = [await deployment.admin.post("/admin/preview", json=body) for _ in range(3)]
        found = [msgspec.json.decode(answer.content, type=Explained) for answer in previews]
        assert await counted(deployment) == before and [engine.load for engine in deployment.engines] == blocks
        assert counts == {name: [run.count for run in shared._runs.values()] for name, shared in seen.items()}
        assert not deployment.program.pods.state.ledger.inflight()
        served = await deployment.chat(opening("harbour"))
        expected = (served.headers["x-warmroute-pod"], int(served.headers["x-warmroute-cached-tokens"]))
        plans = [one.explanation.columns[0].plan for one in found]
        assert {(plan.choice.pod, plan.cached_tokens) for plan in plans} == {expected}


async def test_recorded_decisions_are_replayed(deploy: Deploy, tmp_path: Path) -> None:
    """The same decision under the recorded policy, another under another policy."""
    file = tmp_path / "receipts.jsonl"
    async with deploy(pods=3, receipts=file) as deployment:
        await converse(deployment, opening("tides"), turns=4)
        await asyncio.gather(*(deployment.chat(opening(f"road {number % 3}", 60)) for number in range(12)))
    same, other = (
        review([(seen.scene(), was, POLICIES[name]) for seen, was, _ in choices(file, Counter())], name)
        for name in ("cost_aware", "round_robin")
    )
    assert (same.decisions, same.changed) == (16, 0)
    assert other.decisions == 16 and other.changed > 0


async def test_the_explain_command_prints_a_decision(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 100 columns; an unknown id or a missing router is one line and exit code 1."""

    def typed(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["warmroute", "explain", *arguments])
        with pytest.raises(SystemExit) as ended, capture_logs():  # those of the router, which is in this process
            main()
        return int(ended.value.code or 0)

    monkeypatch.setenv("COLUMNS", "100")
    async with deploy(pods=2) as deployment:
        asked, url = await deployment.chat(opening("tides")), str(deployment.admin.base_url)
        capsys.readouterr()
        known = await asyncio.to_thread(typed, asked.headers["x-request-id"], "--url", url)
        printed = capsys.readouterr().out
        unknown = await asyncio.to_thread(typed, "nobody", "--url", url)
    nowhere = await asyncio.to_thread(typed, "nobody", "--url", url)
    assert (known, unknown, nowhere) == (0, 1, 1)
    assert "= cost, ms" in printed and max(map(len, printed.splitlines())) <= 100
    assert "No decision about `nobody` is in memory" in capsys.readouterr().err


# --- receipts ---


SECRET = "the harbour's secret is seven anchors "


def shared_chat(number: int) -> Chat:
    return [{"role": "system", "content": SECRET * 60}, {"role": "user", "content": f"boat {number} " * 30}]


async def test_receipts_are_replayed_in_the_simulator(deploy: Deploy, tmp_path: Path) -> None:
    """Every request with lengths, blocks and hits, without prompt text; the simulator finds the same hits as the
    engines."""
    file = tmp_path / "receipts.jsonl"
    async with deploy(pods=2, receipts=file) as deployment:
        for number in range(12):
            assert (await deployment.chat(shared_chat(number))).status_code == 200
        assert (
            await deployment.client.post("/v1/chat/completions", json={"model": "none", "messages": []})
        ).status_code >= 400
    receipts = receipts_of(file)
    good = [one for one in receipts if one.result == "ok"]
    assert len(good) == 12 and len(receipts) >= 12
    assert "anchors" not in file.read_text() and file.stat().st_mode & 0o077 == 0
    first, *others = good
    assert first.prompt_tokens > 500 and first.output_tokens == 8 and first.cached_tokens == 0
    assert all(one.blocks[:3] == first.blocks[:3] for one in others)
    assert {one.pod for one in good} <= {engine.url.removeprefix("http://") for engine in deployment.engines}
    setup = experiment(DEFAULT_FLEET, Source(file))
    again = setup.run(Setting("cost_aware", 1.0, 2)).figures
    found = sum(one.cached_tokens or 0 for one in good)
    assert again.requests == 12
    assert abs(again.cached_tokens - found) <= 128 * 12


# --- traces ---


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
