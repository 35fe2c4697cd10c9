"""Prefill and decode pods behind a gateway: which requests are sent, by whom, and what stays when one fails."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("grpc")

from loadtest.mock_engine.faults import Fault, FaultKind
from router.frontends.extproc.messages import BUFFERED, FULL_DUPLEX_STREAMED, NONE
from tests.extproc.conftest import Answer, Pick, Picking, chat

pytestmark = [pytest.mark.net, pytest.mark.anyio]
PREFILL_HEADER = b"x-prefiller-host-port"
TEXT = "Which rivers of Europe are the longest? " * 20


def handoffs(picking: Picking) -> dict[str, float]:
    """Handoffs by result."""
    samples = (one for family in picking.program.metrics.registry.collect() for one in family.samples)
    return {one.labels["result"]: one.value for one in samples if one.name == "warmroute_handoffs_total"}


async def sent(picking: Picking, answer: Answer) -> dict[str, Any]:
    """The response of the pod that was picked, to the body that the gateway sends it."""
    async with httpx.AsyncClient() as client:
        response = await client.post(f"http://{answer.picked[0]}/v1/chat/completions", content=answer.body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("modes", [(FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED), (FULL_DUPLEX_STREAMED, NONE)])
async def test_the_picker_sends_the_prefill_request_and_names_its_kv_in_the_body(
    picker: Pick, modes: tuple[int, int]
) -> None:
    async with picker(handoff="nixl") as picking:
        stream = picking.stream()
        answer = await stream.ask(chat(TEXT), modes=modes)
        assert answer.picked == [picking.pods[1]]
        assert PREFILL_HEADER not in answer.headers
        params = msgspec.json.decode(answer.body)["kv_transfer_params"]
        assert f"{params['remote_host']}:{params['remote_port']}" == picking.pods[0]
        assert picking.engines[0].pinned_requests
        response = await sent(picking, answer)
        assert not picking.engines[0].pinned_requests, "the decode pod has taken the KV"
        await stream.respond()
        if modes[1] == FULL_DUPLEX_STREAMED:
            await stream.send(response_body={"body": msgspec.json.encode(response), "end_of_stream": True})
            await stream.receive()
        await stream.end()
        await picking.until(lambda: picking.results() == {"ok": 1})
        assert (handoffs(picking), picking.leases) == ({"ok": 1}, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_offer_of_the_decode_pod_reaches_nobody(picker: Pick, stream: bool) -> None:
    """With it one could read foreign KV."""
    offer = msgspec.json.encode({"choices": [], "kv_transfer_params": {"do_remote_decode": True, "remote_host": "h"}})
    sent = b"data: " + offer + b"\n\ndata: [DONE]\n\n" if stream else offer
    async with picker(handoff="nixl") as picking:
        exchange, shown, is_complete = picking.stream(), b"", False
        await exchange.ask(chat(TEXT, stream=stream), modes=(FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED))
        head = await exchange.respond()
        assert b"content-length" in head.response_headers.response.header_mutation.remove_headers
        for piece, is_last in ((sent[:40], False), (sent[40:], True)):
            await exchange.send(response_body={"body": piece, "end_of_stream": is_last})
        while not is_complete:
            chunk = (await exchange.receive()).response_body.response.body_mutation.streamed_response
            shown, is_complete = shown + chunk.body, chunk.end_of_stream
        assert shown == (b'data: {"choices":[]}\n\ndata: [DONE]\n\n' if stream else b'{"choices":[]}')
        await exchange.end()


async def test_the_sidecar_is_told_the_prefill_pod_and_nothing_else_changes(picker: Pick) -> None:
    given = {"x-prefiller-host-port": "10.9.9.9:1"}
    async with picker(2, {"prefill": "sidecar"}, handoff="nixl") as picking:
        answer = await picking.stream().ask(chat(TEXT), headers=given)
        assert answer.picked == [picking.pods[1]]
        assert answer.headers[PREFILL_HEADER] == picking.pods[0].encode()
        assert answer.body == chat(TEXT)


async def test_without_its_prefill_pod_the_decode_pod_computes_the_prompt(picker: Pick) -> None:
    """Nothing was handed to the gateway, so the next candidate may be tried."""
    async with picker(handoff="nixl") as picking:
        picking.engines[0].inject(Fault(kind=FaultKind.STATUS))
        stream = picking.stream()
        answer = await stream.ask(chat(TEXT))
        assert (answer.picked, answer.body) == ([picking.pods[1]], chat(TEXT))
        await stream.respond()
        await stream.end()
        await picking.until(lambda: picking.results() == {"ok": 1})
        assert (handoffs(picking), picking.leases) == ({"prefill_failed": 1}, 0)


async def test_nothing_stays_booked_when_the_client_leaves_during_the_prefill(picker: Pick) -> None:
    async with picker(handoff="nixl") as picking:
        picking.engines[0].inject(Fault(kind=FaultKind.HANG))
        stream = picking.stream()
        await stream.head()
        await stream.send(request_body={"body": chat(TEXT), "end_of_stream": True})
        await picking.until(lambda: picking.leases)
        stream.call.cancel()
        await picking.until(lambda: picking.server.streams == 0)
        assert (picking.leases, handoffs(picking)) == (0, {"client_gone": 1})


async def test_a_prefill_that_outlasts_a_buffering_gateway_is_answered_in_time(picker: Pick) -> None:
    async with picker(handoff="nixl") as picking:
        picking.engines[0].inject(Fault(kind=FaultKind.HANG))
        stream = picking.stream()
        await stream.head(modes=(BUFFERED, NONE))
        await stream.receive()
        await stream.send(request_body={"body": chat(TEXT), "end_of_stream": True})
        answer = await stream.answer()
        assert answer.status == 503 and b"picker.message_timeout_s" in answer.body
        assert picking.leases == 0


async def test_handoffs_that_need_both_requests_at_once_are_for_the_sidecar(picker: Pick) -> None:
    """A gateway sends the decode request when it likes. Decode pods of SGLang serve nothing alone."""
    async with picker(handoff="bootstrap") as picking:
        answer = await picking.stream().ask(chat(TEXT))
        assert answer.status == 503 and b"picker.prefill" in answer.body
    async with picker(2, {"prefill": "sidecar"}, handoff="bootstrap") as picking:
        assert (await picking.stream().ask(chat(TEXT))).headers[PREFILL_HEADER] == picking.pods[0].encode()


async def test_a_failure_after_the_pick_is_the_gateways(picker: Pick) -> None:
    """It has sent the body, so the picker tries no other pod, and the response passes."""
    async with picker(3) as picking:
        stream = picking.stream()
        await stream.ask(chat(TEXT))
        response = await stream.respond(status=503)
        assert response.WhichOneof("response") == "response_headers"
        await stream.end()
        await picking.until(lambda: picking.results() == {"pod_error": 1})
        assert picking.leases == 0
