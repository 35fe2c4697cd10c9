"""The endpoint picker, asked as Envoy asks: what it answers, and that nothing stays booked."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

grpc: Any = pytest.importorskip("grpc")

from router.config.provider_schema import Provider, ProviderPrice  # noqa: E402
from router.engines.lacks import USAGE_OF_STREAMS  # noqa: E402
from router.frontends.extproc.messages import (  # noqa: E402
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    HealthCheckRequest,
    HealthCheckResponse,
)
from router.frontends.extproc.picker_server import SERVICE  # noqa: E402
from tests.extproc.conftest import Pick, Picking, Stream, chat  # noqa: E402

pytestmark = [pytest.mark.net, pytest.mark.anyio]
DUPLEX = (FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED)


def subset(*addresses: str) -> dict[str, Any]:
    """The gateway's hint, as text."""
    text = {"string_value": ",".join(addresses).encode()}
    fields = [{"key": b"x-gateway-destination-endpoint-subset", "value": text}]
    return {"filter_metadata": [{"key": b"envoy.lb.subset_hint", "value": {"fields": fields}}]}


async def test_a_pick_is_a_header_and_metadata_and_the_body_comes_back(picker: Pick) -> None:
    async with picker() as picking:
        stream = picking.stream()
        answer = await stream.ask(chat("Hello " * 20_000))
        assert answer.picked[0] in picking.pods
        assert answer.metadata == answer.picked[0].encode()
        assert answer.body == chat("Hello " * 20_000)
        assert picking.leases == 1
        await stream.respond()
        await stream.end()
        await picking.until(lambda: picking.results() == {"ok": 1})
        assert picking.leases == 0


async def test_a_prompt_goes_where_its_prefix_is(picker: Pick) -> None:
    """Predicted, because the picker sees neither the response nor events of the pod."""
    async with picker(4) as picking:
        text, found = "What a long and interesting story this is. " * 200, set()
        for question in range(6):
            stream = picking.stream()
            found.add((await stream.ask(chat(f"{text}{question}"))).picked[0])
            await stream.respond()
            await stream.end()
        assert len(found) == 1


async def test_the_hint_limits_the_pods(picker: Pick) -> None:
    async with picker(3) as picking:
        for pod in picking.pods:
            answer = await picking.stream().ask(metadata_context=subset(pod))
            assert answer.picked == [pod]


@pytest.mark.parametrize("addresses", [(), ("10.9.9.9:8000",)])
async def test_no_pod_of_the_hint_is_503(picker: Pick, addresses: tuple[str, ...]) -> None:
    async with picker() as picking:
        answer = await picking.stream().ask(metadata_context=subset(*addresses))
        assert answer.status == 503
        assert msgspec.json.decode(answer.body)["error"]["code"] == "no_ready_pod"
        assert picking.leases == 0


async def test_fallbacks_follow_the_best_pod_where_the_cluster_takes_them(picker: Pick) -> None:
    async with picker(3, {"fallbacks": 2}) as picking:
        assert sorted((await picking.stream().ask()).picked) == sorted(picking.pods)
    async with picker(3) as picking:
        assert len((await picking.stream().ask()).picked) == 1


async def test_headers_that_steer_pods_are_removed(picker: Pick) -> None:
    given = {"x-prefiller-host-port": "10.0.0.1:1", "authorization": "Bearer secret", "x-mine": "kept"}
    async with picker() as picking:
        answer = await picking.stream().ask(headers=given)
        assert answer.removed == {b"x-prefiller-host-port", b"authorization"}


async def test_fields_that_steer_engines_are_removed(picker: Pick) -> None:
    async with picker() as picking:
        answer = await picking.stream().ask(chat(priority=-1))
        assert answer.body == chat()


async def test_a_client_cannot_choose_a_pod_unless_tests_may(picker: Pick) -> None:
    async with picker(3, {"test_header": True}) as picking:
        for pod in picking.pods:
            assert (await picking.stream().ask(headers={"test-epp-endpoint-selection": pod})).picked == [pod]
    async with picker(3) as picking:
        given = {"test-epp-endpoint-selection": "10.9.9.9:1"}
        assert (await picking.stream().ask(headers=given)).picked[0] in picking.pods


async def test_an_error_has_the_shape_of_its_api(picker: Pick) -> None:
    async with picker() as picking:
        answer = await picking.stream().ask(chat(model="nope"), path="/v1/messages")
        assert (answer.status, answer.headers[b"content-type"]) == (404, b"application/json")
        assert msgspec.json.decode(answer.body)["type"] == "error"
        assert b"content-length" not in answer.headers


async def test_keys_salts_and_quotas_of_tenants(picker: Pick, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    digest = sha256(b"key-acme").hexdigest()
    file.write_text(f"tenants:\n- {{name: acme, keys: [{digest}], quotas: [{{requests_per_minute: 1}}]}}\n")
    key = {"authorization": "Bearer key-acme"}
    async with picker(tenants=str(file)) as picking:
        stream = picking.stream()
        await stream.head()
        assert (await stream.answer()).status == 401, "before the body is sent"
        first = await picking.stream().ask(headers=key)
        assert "cache_salt" in msgspec.json.decode(first.body)
        second = picking.stream()
        await second.head(headers=key)
        refused = await second.answer()
        assert (refused.status, int(refused.headers[b"retry-after"]) > 0) == (429, True)


async def test_a_body_that_is_too_large_is_413(picker: Pick) -> None:
    async with picker(limits={"max_body_bytes": 100}) as picking:
        assert (await picking.stream().ask(chat("Hello " * 100))).status == 413
        assert picking.program.edge.body_memory.bytes == 0


async def test_a_body_that_does_not_end_is_408(picker: Pick) -> None:
    async with picker(limits={"request_timeout_s": 0.1}) as picking:
        stream = picking.stream()
        await stream.head()
        await stream.send(request_body={"body": chat()})
        assert (await stream.answer()).status == 408
        assert picking.program.edge.body_memory.bytes == 0


async def test_a_repeated_end_of_the_body_is_ignored(picker: Pick) -> None:
    async with picker() as picking:
        stream = picking.stream()
        await stream.ask()
        await stream.send(request_body={"body": b"again", "end_of_stream": True})
        response = await stream.respond()
        assert response.WhichOneof("response") == "response_headers"
        await stream.end()
        await picking.until(lambda: picking.results() == {"ok": 1})


async def test_a_buffered_request_is_answered_with_its_body(picker: Pick) -> None:
    """The gateway sends the body after the answer to the headers; it keeps a body that does not change."""
    async with picker() as picking:
        stream = picking.stream()
        await stream.head(modes=(BUFFERED, NONE))
        assert (await stream.receive()).WhichOneof("response") == "request_headers"
        await stream.send(request_body={"body": chat(), "end_of_stream": True})
        response = await stream.receive()
        assert response.WhichOneof("response") == "request_body"
        assert response.request_body.response.body_mutation.WhichOneof("mutation") is None
        assert response.dynamic_metadata.fields


@pytest.mark.parametrize("pack", [gzip.compress, lambda body: body.replace(b'"model":', b'"not_model":')])
async def test_a_gateway_that_buffers_gets_the_body_that_pods_can_read(
    picker: Pick, pack: Callable[[bytes], bytes]
) -> None:
    """Unpacked, and with the model that it does not name."""
    body, is_packed = chat(), pack is gzip.compress
    async with picker() as picking:
        stream = picking.stream()
        await stream.head(modes=(BUFFERED, NONE), headers={"content-encoding": "gzip"} if is_packed else {})
        await stream.receive()
        await stream.send(request_body={"body": pack(body), "end_of_stream": True})
        common = (await stream.receive()).request_body.response
        sent = common.body_mutation.body
        assert json.loads(sent)["model"] == json.loads(body)["model"]
        headers = {one.header.key: one.header.raw_value for one in common.header_mutation.set_headers}
        assert headers[b"content-length"] == b"%d" % len(sent) and (sent == body) == is_packed
        assert (b"content-encoding" in common.header_mutation.remove_headers) == is_packed


async def test_trailers_after_a_buffered_body_do_not_hold_the_request(picker: Pick) -> None:
    """The gateway sends them after the answer to the body, which therefore does not end the stream."""
    async with picker() as picking:
        stream = picking.stream()
        await stream.head(modes=(BUFFERED, NONE))
        await stream.receive()
        await stream.send(request_body={"body": chat()})
        assert (await stream.receive()).WhichOneof("response") == "request_body"
        await stream.send(request_trailers={})
        assert (await stream.receive()).WhichOneof("response") == "request_trailers"
        await stream.respond()
        await stream.end()
        await picking.until(lambda: picking.results() == {"ok": 1})


async def test_responses_that_pass_the_picker_are_unchanged_and_counted(picker: Pick) -> None:
    events = [b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n', b"data: [DONE]\n\n"]
    async with picker() as picking:
        stream = picking.stream()
        await stream.ask(chat(stream=True), modes=DUPLEX)
        await stream.respond()
        for number, event in enumerate(events):
            await stream.send(response_body={"body": event, "end_of_stream": number == len(events) - 1})
            chunk = (await stream.receive()).response_body.response.body_mutation.streamed_response
            assert (chunk.body, chunk.end_of_stream) == (event, number == len(events) - 1)
        await stream.end()
        await picking.until(lambda: picking.results() == {"ok": 1})
        assert picking.leases == 0


async def test_streams_that_pass_the_picker_hide_usage_that_only_it_has_asked_for(picker: Pick) -> None:
    """It is counted. Where responses do not pass, nothing is asked, nor is a pod that is known to refuse it."""
    text = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    async with picker(1) as picking:
        asked = await picking.stream().ask(chat(stream=True))
        assert b"stream_options" not in asked.body
        stream = picking.stream()
        asked = await stream.ask(chat(stream=True), modes=DUPLEX)
        assert msgspec.json.decode(asked.body)["stream_options"] == {"include_usage": True}
        await stream.respond()
        for number, event in enumerate([text, usage, b"data: [DONE]\n\n"]):
            await stream.send(response_body={"body": event, "end_of_stream": number == 2})
        chunks = [(await stream.receive()).response_body.response.body_mutation.streamed_response for _ in range(2)]
        assert [(chunk.body, chunk.end_of_stream) for chunk in chunks] == [(text, False), (b"data: [DONE]\n\n", True)]
        await stream.end()
        refused = picking.stream()
        await refused.ask(chat(stream=True), modes=DUPLEX)
        await refused.respond(400)
        await refused.send(response_body={"body": b'{"error":"stream_options"}', "end_of_stream": True})
        assert (await refused.receive()).WhichOneof("response") == "response_body"
        for pod in picking.pods:
            picking.program.fleet.learn(pod, lacks=frozenset({USAGE_OF_STREAMS}))
        asked = await picking.stream().ask(chat(stream=True), modes=DUPLEX)
        assert b"stream_options" not in asked.body


async def test_the_lease_moves_to_the_pod_that_the_gateway_used(picker: Pick) -> None:
    async with picker(2, {"fallbacks": 1}) as picking:
        stream = picking.stream()
        _, used = (await stream.ask()).picked
        fields = [{"key": b"upstream.address", "value": {"string_value": used.encode()}}]
        await stream.respond(attributes=[{"key": b"envoy.filters.http.ext_proc", "value": {"fields": fields}}])
        inflight = picking.program.pods.state.ledger.inflight()
        assert {pod for pod, found in inflight.items() if found.requests} == {used}


@pytest.mark.parametrize("modes", [(1, 0), (0, 0), (4, 1), (4, 2)])
async def test_modes_that_would_break_streams_are_refused(picker: Pick, modes: tuple[int, int]) -> None:
    async with picker() as picking:
        stream = picking.stream()
        await stream.head(modes=modes)
        assert await stream.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "processing_mode" in await stream.call.details()


async def leave(picking: Picking, moment: int) -> None:
    """Send a request, and reset the stream at a moment of it."""
    stream = picking.stream()
    steps = (
        stream.head,
        lambda: stream.send(request_body={"body": chat(stream=True)}),
        lambda: stream.send(request_body={"body": b" ", "end_of_stream": True}),
        stream.answer,
        stream.respond,
    )
    for step in steps[:moment]:
        await step()
    stream.call.cancel()


@pytest.mark.parametrize("moment", range(6))
async def test_nothing_stays_booked_when_a_client_leaves(picker: Pick, moment: int) -> None:
    async with picker() as picking:
        for _ in range(10):
            await leave(picking, moment)
        await picking.until(lambda: picking.server.streams == 0)
        edge = picking.program.edge
        assert (picking.leases, edge.body_memory.bytes) == (0, 0)
        assert picking.program.metrics.figures()["in_flight"] == 0


async def test_health_checks_follow_the_fleet(picker: Pick) -> None:
    async with picker() as picking:
        check = picking.channel.unary_unary("/grpc.health.v1.Health/Check")

        async def status(service: str) -> int:
            data = await check(HealthCheckRequest(service=service.encode()).SerializeToString())
            return int(HealthCheckResponse.FromString(data).status)

        assert [await status(name) for name in ("", "liveness", "readiness", SERVICE)] == [1, 1, 1, 1]
        picking.program.edge.is_stopping = True
        assert [await status(name) for name in ("liveness", "readiness", SERVICE)] == [1, 2, 2]
        with pytest.raises(grpc.aio.AioRpcError):
            await status("nothing")


async def test_a_drained_picker_closes_streams_without_an_error(picker: Pick) -> None:
    """The response of the pod goes on without the picker."""
    async with picker() as picking:
        stream: Stream = picking.stream()
        await stream.ask()
        await stream.respond()
        closing = asyncio.create_task(picking.server.close(0.0, 0.1))
        assert await stream.receive() is None
        assert await stream.call.code() is grpc.StatusCode.OK
        await closing
        assert picking.leases == 0


async def test_a_drained_picker_refuses_requests_that_have_no_pod_yet(picker: Pick) -> None:
    """Without a word, the gateway would send them past the picker, unchanged."""
    async with picker() as picking:
        stream = picking.stream()
        await stream.head()
        await stream.send(request_body={"body": b" "})
        await picking.until(lambda: picking.server.streams == 1)
        closing = asyncio.create_task(picking.server.close(0.0, 0.1))
        answer = await stream.answer()
        assert answer.status == 503 and "stopping" in answer.body.decode()
        await closing
        assert picking.program.edge.body_memory.bytes == 0


async def test_models_are_listed_by_the_picker_itself(picker: Pick) -> None:
    async with picker() as picking:
        stream = picking.stream()
        await stream.head("/v1/models", "GET")
        answer = await stream.answer()
        assert (answer.status, msgspec.json.decode(answer.body)["data"][0]["id"]) == (200, "demo")


@pytest.mark.parametrize("requests", ["gateway", "picker"])
async def test_a_picker_whose_gateway_sends_all_requests_warns_of_providers(
    picker: Pick, tmp_path: Path, requests: str
) -> None:
    (tmp_path / "key").write_text("key")
    there: dict[str, Any] = {"url": "https://example.com", "model": "there", "key_file": str(tmp_path / "key")}
    one = Provider(name="x", budget_per_hour=1.0, price=ProviderPrice(prompt=1.0, output=1.0), **there)
    with capture_logs() as log:
        async with picker(1, {"requests": requests}, providers=(one,)):
            pass
    assert any(line["event"] == "providers are not asked" for line in log) is (requests == "gateway")
