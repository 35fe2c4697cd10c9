"""Whatever a pod does wrong: what does the client see, who is blamed, and does anything stay behind?"""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import httpx
import pytest

from router.config.schema import Limits
from router.sim.mock_engine import Fault, FaultKind
from router.types import PodState
from tests.stories.conftest import City, OpenCity
from tests.stories.test_failures import holder_of
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

IMPATIENT = Limits(first_byte_timeout_s=0.3, idle_timeout_s=0.3)
SSE = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
CHUNK = f"{len(EVENT):x}\r\n{EVENT}\r\n"


def raw(said: str, then: Literal["close", "reset", "hang"] = "close", piece_bytes: int = 65536) -> Fault:
    """A pod that says just this, again and again."""
    return Fault(kind=FaultKind.RAW, count=None, raw=said, then=then, piece_bytes=piece_bytes)


@dataclass(frozen=True)
class Row:
    """A fault, and what the router calls it."""

    fault: Fault
    called: str
    streams: bool = True


BEFORE_THE_FIRST_BYTE = {
    "connect refused": Row(Fault(kind=FaultKind.REFUSE), "ConnectFailed"),
    "reset before the headers": Row(Fault(kind=FaultKind.RESET, count=None), "UpstreamBroken"),
    "reset inside the headers": Row(raw("HTTP/1.1 200 OK\r\ncontent-ty", "reset"), "UpstreamBroken"),
    "reset after the headers": Row(raw(SSE, "reset"), "UpstreamBroken"),
    "close after the headers": Row(raw(SSE), "UpstreamBroken"),
    "hang before the headers": Row(Fault(kind=FaultKind.HANG, count=None), "UpstreamTimeout"),
    "hang inside the headers": Row(raw("HTTP/1.1 200 OK\r\n", "hang"), "UpstreamTimeout"),
    "hang after the headers": Row(raw(SSE, "hang"), "UpstreamTimeout"),
    "less than content-length": Row(raw(JSON + "content-length: 99\r\n\r\n{}"), "UpstreamBroken", streams=False),
    "two content-lengths": Row(raw(JSON + "content-length: 2\r\ncontent-length: 3\r\n\r\n{}"), "UpstreamBroken"),
    "cut inside a chunk": Row(raw(JSON + "transfer-encoding: chunked\r\n\r\n9\r\n{"), "UpstreamBroken", streams=False),
    "no chunk size": Row(raw(SSE + "zz\r\n"), "UpstreamBroken"),
    "not HTTP": Row(raw("SSH-2.0-OpenSSH_9.6\r\n"), "UpstreamBroken"),
    "no such status": Row(raw("HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\nok"), "UpstreamBroken"),
    "an upgrade": Row(raw("HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), "UpstreamBroken"),
    "headers without end": Row(raw("HTTP/1.1 200 OK\r\n" + "x: y\r\n" * 100_000, "hang"), "UpstreamBroken"),
}

AFTER_THE_FIRST_BYTE = {
    "reset": (raw(SSE + CHUNK, "reset"), "upstream_broken"),
    "close": (raw(SSE + CHUNK), "upstream_broken"),
    "cut inside a chunk": (raw(SSE + CHUNK + CHUNK[:9]), "upstream_broken"),
    "no chunk size": (raw(SSE + CHUNK + "zz\r\n", piece_bytes=len(SSE + CHUNK)), "upstream_broken"),
    "hang": (raw(SSE + CHUNK, "hang"), "upstream_timeout"),
}


async def nothing_stays_behind(city: City) -> None:
    """No lease, no request in flight."""
    await city.until(lambda: not city.program.pods.ledger.inflight())
    metrics = (await city.client.get("/metrics")).text
    assert "warmroute_in_flight_requests 0.0" in metrics


async def attempts(city: City, at: int, result: str) -> float:
    """How often the pod is counted with this result."""
    pod = city.engines[at].url.removeprefix("http://")
    wanted = f'warmroute_pod_requests_total{{pod="{pod}",result="{result}"}} '
    lines = (await city.client.get("/metrics")).text.splitlines()
    return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


@pytest.mark.parametrize("name", BEFORE_THE_FIRST_BYTE)
async def test_before_the_first_byte_another_pod_answers(open_city: OpenCity, name: str) -> None:
    """The client notices nothing; the pod at fault, and no other, is held to it by name."""
    row = BEFORE_THE_FIRST_BYTE[name]
    async with open_city(pods=2, limits=IMPATIENT) as city:
        at = await holder_of(city, "stones")
        city.engines[at].inject(row.fault)
        answer = await city.chat(opening("stones"), stream=row.streams)
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-pod"] == city.engines[1 - at].url.removeprefix("http://")
        assert await attempts(city, at, row.called) == 1
        assert await attempts(city, 1 - at, row.called) == 0
        await nothing_stays_behind(city)


@pytest.mark.parametrize("name", AFTER_THE_FIRST_BYTE)
async def test_after_the_first_byte_the_client_is_told(open_city: OpenCity, name: str) -> None:
    """What came passes; then an error event, and no second beginning."""
    fault, code = AFTER_THE_FIRST_BYTE[name]
    async with open_city(pods=2, limits=IMPATIENT) as city:
        at = await holder_of(city, "stones")
        city.engines[at].inject(fault)
        answer = await city.chat(opening("stones"), stream=True)
        events = answer.text.strip().split("\n\n")
        assert answer.status_code == 200
        assert answer.text.startswith(EVENT) and answer.text.count(EVENT) == 1
        assert json.loads(events[-1].strip().removeprefix("data: "))["error"]["code"] == code
        assert "[DONE]" not in answer.text
        assert await attempts(city, at, "UpstreamTimeout" if "timeout" in code else "UpstreamBroken") == 1
        await nothing_stays_behind(city)


@pytest.mark.parametrize(
    "fault",
    [
        raw(SSE + CHUNK * 3 + "0\r\n\r\n", piece_bytes=1),
        raw(SSE + "".join(f"1\r\n{byte}\r\n" for byte in EVENT * 3) + "0\r\n\r\n"),
    ],
    ids=["bytes one by one", "chunks of one byte"],
)
async def test_however_small_the_pieces_the_answer_is_the_same(open_city: OpenCity, fault: Fault) -> None:
    """And nobody is blamed."""
    async with open_city(pods=1) as city:
        city.engines[0].inject(fault)
        answer = await city.chat(opening("sand"), stream=True)
        assert answer.text == EVENT * 3
        assert await attempts(city, 0, "ok") == 1
        await nothing_stays_behind(city)


async def test_a_slow_drip_is_no_silence(open_city: OpenCity) -> None:
    """An answer may take longer than any deadline while it goes on."""
    async with open_city(pods=1, limits=IMPATIENT) as city:
        city.engines[0].inject(Fault(kind=FaultKind.SLOW, pause_s=0.1))
        answer = await city.chat(opening("drops"), stream=True, max_tokens=8)
        assert answer.text.endswith("data: [DONE]\n\n")
        await nothing_stays_behind(city)


async def test_a_pod_that_answers_nothing_but_server_errors_is_ejected(open_city: OpenCity) -> None:
    """Its queue is always empty, so that it would get everything."""
    async with open_city(pods=1) as city:
        city.engines[0].inject(Fault(kind=FaultKind.STATUS, count=3))
        states: list[PodState] = []
        city.program.fleet.listen(lambda pod, old, new: states.append(new))
        answers = [await city.chat(opening("ash")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [500, 500, 500]
        assert states[0] is PodState.EJECTED
        await nothing_stays_behind(city)


async def test_a_pod_whose_first_tokens_come_far_too_late_is_ejected(open_city: OpenCity) -> None:
    """Its health says nothing, and no request fails: only the clock tells."""
    async with open_city(pods=3, probes={"slow_ttft_factor": 1.01, "slow_ttfts_to_eject": 2}) as city:
        at = await holder_of(city, "snails")
        city.engines[at].inject(Fault(kind=FaultKind.SLOW, pause_s=0.6, count=None))
        ejected: list[str] = []
        city.program.fleet.listen(lambda pod, _, new: ejected.append(pod.url) if new is PodState.EJECTED else None)
        for _ in range(2):
            assert (await city.chat(opening("snails"), stream=True, max_tokens=1)).status_code == 200
        assert ejected == [city.engines[at].url]


async def test_a_fleet_that_fails_everything_is_not_asked_three_times_for_each(open_city: OpenCity) -> None:
    """Beyond the budget the failure stands, and that is counted."""
    async with open_city(pods=3, limits=Limits(retry_budget=0.0)) as city:
        city.program.pods.breaker._failures_to_eject = 10_000
        for engine in city.engines:
            engine.inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.SERVICE_UNAVAILABLE, count=None))
        asked = 40
        answers = [await city.chat(opening("dust", 5)) for _ in range(asked)]
        assert {answer.status_code for answer in answers} == {503}
        metrics = (await city.client.get("/metrics")).text
        assert 'warmroute_retries_total{reason="UpstreamBroken"} 20.0' in metrics
        assert 'warmroute_retries_refused_total{reason="status"}' in metrics
        await nothing_stays_behind(city)


# --- what clients do ---


async def tell(city: City, *sent: bytes) -> bytes:
    """All that the router says to these bytes, until it hangs up."""
    host, port = city.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    for piece in sent:
        writer.write(piece)
        await asyncio.sleep(0)
    answer = await reader.read()
    writer.close()
    return answer


def message(body: bytes, *headers: bytes, version: bytes = b"1.1", close: bool = True) -> bytes:
    lines = [b"POST /v1/chat/completions HTTP/" + version, b"host: h", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, *([b"connection: close"] if close else []), b"", body])


def chat(topic: str, **fields: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": opening(topic, 3), "max_tokens": 2, **fields}).encode()


async def test_clients_of_every_kind_are_answered(open_city: OpenCity) -> None:
    """Pipelined requests, in order; `Expect: 100-continue`; HTTP/1.0, without chunks."""
    async with open_city(pods=1) as city:
        together = await tell(city, message(chat("a"), close=False) + message(chat("b", stream=True)))
        assert together.count(b"HTTP/1.1 200 OK") == 2
        assert together.index(b'"chat.completion"') < together.index(b"text/event-stream")
        expecting = message(chat("c"), b"expect: 100-continue")
        head, _, body = expecting.partition(b"\r\n\r\n")
        assert (await tell(city, head + b"\r\n\r\n", body)).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
        old = await tell(city, message(chat("d", stream=True), version=b"1.0"))
        assert old.endswith(b"data: [DONE]\n\n") and b"chunked" not in old
        await nothing_stays_behind(city)


@pytest.mark.parametrize("encodings", [("gzip",), ("identity", "gzip")])
async def test_a_body_that_is_compressed_is_refused_in_words(open_city: OpenCity, encodings: tuple[str, ...]) -> None:
    """Before it is read; no pod sees it."""
    async with open_city(pods=1) as city:
        headers = [("content-encoding", encoding) for encoding in encodings]
        answer = await city.client.post("/v1/chat/completions", content=gzip.compress(chat("a")), headers=headers)
        assert answer.status_code == 400
        assert "content-encoding" in answer.json()["error"]["message"]
        assert await attempts(city, 0, "ok") == 0


async def test_the_router_can_be_reached_by_ipv6(open_city: OpenCity) -> None:
    """And answers there as anywhere."""
    async with open_city(pods=1, host="::1") as city:
        assert (await city.chat(opening("isles"))).status_code == 200


async def test_fifty_megabytes_pass_where_they_may(open_city: OpenCity) -> None:
    """Under the cap to the pod, whatever that says to it; over the cap a 413, whether declared or chunked."""
    size = 50 * 1024 * 1024
    body = json.dumps({"model": "demo", "input": "x", "padding": "y" * size}).encode()

    async def chunked() -> Any:
        for at in range(0, len(body), 1 << 20):
            yield body[at : at + (1 << 20)]

    async with open_city(pods=1, limits=Limits(max_body_bytes=2 * size)) as city:
        assert (await city.client.post("/v1/embeddings", content=body)).status_code == 200
        await nothing_stays_behind(city)
    async with open_city(pods=1) as city:
        for content in (body, chunked()):
            try:
                answer = await city.client.post("/v1/embeddings", content=content)
            except httpx.WriteError:
                continue  # it went on sending when the connection was over
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        await nothing_stays_behind(city)


async def test_more_requests_than_may_be_in_flight_are_told_to_come_back(open_city: OpenCity) -> None:
    """503 with Retry-After, in OpenAI's shape; those that are served go on."""
    async with open_city(pods=1, limits=Limits(max_in_flight=1)) as city:
        city.engines[0].inject(Fault(kind=FaultKind.HANG))
        hanging = asyncio.create_task(city.chat(opening("queues")))
        await city.until(lambda: bool(city.program.pods.ledger.inflight()))
        answer = await city.chat(opening("queues"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "saturated"
        hanging.cancel()
        await asyncio.wait([hanging])
        await nothing_stays_behind(city)
        assert (await city.chat(opening("queues"))).status_code == 200


async def test_a_request_that_never_ends_is_a_408(open_city: OpenCity) -> None:
    """In OpenAI's shape, then the connection ends; no pod sees it."""
    async with open_city(pods=1, limits=Limits(request_timeout_s=0.1)) as city:
        for sent in (message(chat("a"))[:-1], message(chat("a"))[:9]):
            answer = await tell(city, sent)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert await attempts(city, 0, "ok") == 0


async def test_headers_that_are_too_large_are_a_431(open_city: OpenCity) -> None:
    """Also where they come at once."""
    async with open_city(pods=1) as city:
        answer = await city.client.post("/v1/embeddings", json={}, headers={"x-large": "y" * 70_000})
        assert answer.status_code == 431
        assert answer.json()["error"]["code"] == "headers_too_large"
