"""Every fault of a pod: what the client sees, which pod the failure is recorded for, and that nothing remains."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import httpx
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.schema import Limits
from router.types import PodState
from tests.stories.conftest import DEADLINE_S, Deploy, Deployment
from tests.stories.test_failures import holder_of
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

SHORT_TIMEOUTS = Limits(connect_timeout_s=5.0, first_byte_timeout_s=0.3, idle_timeout_s=0.3)
SSE = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
CHUNK = f"{len(EVENT):x}\r\n{EVENT}\r\n"


def raw(said: str, then: Literal["close", "reset", "hang"] = "close", piece_bytes: int = 65536) -> Fault:
    """A pod that always writes these bytes."""
    return Fault(kind=FaultKind.RAW, count=None, raw=said, then=then, piece_bytes=piece_bytes)


@dataclass(frozen=True)
class Row:
    """A fault, and the router's name for it."""

    fault: Fault
    called: str
    streams: bool = True


BEFORE_THE_FIRST_BYTE = {
    "connect refused": Row(Fault(kind=FaultKind.REFUSE), "connect_failed"),
    "503": Row(Fault(kind=FaultKind.STATUS, status=HTTPStatus.SERVICE_UNAVAILABLE), "upstream_broken"),
    "engine gone": Row(Fault(kind=FaultKind.CORE_DIES), "upstream_broken"),
    "reset before the headers": Row(Fault(kind=FaultKind.RESET, count=None), "upstream_broken"),
    "reset inside the headers": Row(raw("HTTP/1.1 200 OK\r\ncontent-ty", "reset"), "upstream_broken"),
    "reset after the headers": Row(raw(SSE, "reset"), "upstream_broken"),
    "close after the headers": Row(raw(SSE), "upstream_broken"),
    "hang before the headers": Row(Fault(kind=FaultKind.HANG, count=None), "upstream_timeout"),
    "hang inside the headers": Row(raw("HTTP/1.1 200 OK\r\n", "hang"), "upstream_timeout"),
    "hang after the headers": Row(raw(SSE, "hang"), "upstream_timeout"),
    "less than content-length": Row(raw(JSON + "content-length: 99\r\n\r\n{}"), "upstream_broken", streams=False),
    "two content-lengths": Row(raw(JSON + "content-length: 2\r\ncontent-length: 3\r\n\r\n{}"), "upstream_broken"),
    "cut inside a chunk": Row(raw(JSON + "transfer-encoding: chunked\r\n\r\n9\r\n{"), "upstream_broken", streams=False),
    "no chunk size": Row(raw(SSE + "zz\r\n"), "upstream_broken"),
    "not HTTP": Row(raw("SSH-2.0-OpenSSH_9.6\r\n"), "upstream_broken"),
    "no such status": Row(raw("HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\nok"), "upstream_broken"),
    "an upgrade": Row(raw("HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), "upstream_broken"),
    "headers without end": Row(raw("HTTP/1.1 200 OK\r\n" + "x: y\r\n" * 100_000, "hang"), "upstream_broken"),
}

AFTER_THE_FIRST_BYTE = {
    "reset": (raw(SSE + CHUNK, "reset"), "upstream_broken"),
    "close": (raw(SSE + CHUNK), "upstream_broken"),
    "cut inside a chunk": (raw(SSE + CHUNK + CHUNK[:9]), "upstream_broken"),
    "no chunk size": (raw(SSE + CHUNK + "zz\r\n", piece_bytes=len(SSE + CHUNK)), "upstream_broken"),
    "hang": (raw(SSE + CHUNK, "hang"), "upstream_timeout"),
}


def breaks(deployment: Deployment, at: int, fault: Fault) -> None:
    """The pod has this fault from now on. The router has no connection to it, and short timeouts for this pod only: the
    other one may be as slow as the machine."""
    deployment.engines[at].inject(fault)
    url, pools = deployment.engines[at].url, deployment.program.pods.pools
    [pod] = [status.pod for status in deployment.program.fleet.snapshot.pods if status.pod.url == url]
    pools.remove(pod.id)
    pools.of(pod).limits = SHORT_TIMEOUTS


async def nothing_stays_behind(deployment: Deployment) -> None:
    """Whether there are no leases and no requests in flight."""
    await deployment.until(lambda: not deployment.program.pods.state.ledger.inflight())
    metrics = (await deployment.admin.get("/metrics")).text
    assert "warmroute_in_flight_requests 0.0" in metrics


async def attempts(deployment: Deployment, at: int, result: str) -> float:
    """Number of attempts on the pod with this result."""
    pod = deployment.engines[at].url.removeprefix("http://")
    wanted = f'warmroute_pod_requests_total{{pod="{pod}",result="{result}"}} '
    lines = (await deployment.admin.get("/metrics")).text.splitlines()
    return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


@pytest.mark.parametrize("name", BEFORE_THE_FIRST_BYTE)
async def test_a_failure_before_the_first_byte_is_retried_on_another_pod(deploy: Deploy, name: str) -> None:
    """The client sees no error; the failure is recorded for that pod only."""
    row = BEFORE_THE_FIRST_BYTE[name]
    async with deploy(pods=2) as deployment:
        at = await holder_of(deployment, "stones")
        breaks(deployment, at, row.fault)
        answer = await deployment.chat(opening("stones"), stream=row.streams)
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-pod"] == deployment.engines[1 - at].url.removeprefix("http://")
        assert await attempts(deployment, at, row.called) == 1
        assert await attempts(deployment, 1 - at, row.called) == 0
        await nothing_stays_behind(deployment)


@pytest.mark.parametrize("name", AFTER_THE_FIRST_BYTE)
async def test_a_failure_after_the_first_byte_reaches_the_client(deploy: Deploy, name: str) -> None:
    """Received data is forwarded, then an error event, and no second response."""
    fault, code = AFTER_THE_FIRST_BYTE[name]
    async with deploy(pods=2) as deployment:
        at = await holder_of(deployment, "stones")
        breaks(deployment, at, fault)
        answer = await deployment.chat(opening("stones"), stream=True)
        events = answer.text.strip().split("\n\n")
        assert answer.status_code == 200
        assert answer.text.startswith(EVENT) and answer.text.count(EVENT) == 1
        assert json.loads(events[-1].strip().removeprefix("event: error\ndata: "))["error"]["code"] == code
        assert "[DONE]" not in answer.text
        assert await attempts(deployment, at, "upstream_timeout" if "timeout" in code else "upstream_broken") == 1
        await nothing_stays_behind(deployment)


@pytest.mark.parametrize(
    "fault",
    [
        raw(SSE + CHUNK * 3 + "0\r\n\r\n", piece_bytes=1),
        raw(SSE + "".join(f"1\r\n{byte}\r\n" for byte in EVENT * 3) + "0\r\n\r\n"),
    ],
    ids=["bytes one by one", "chunks of one byte"],
)
async def test_a_response_in_tiny_pieces_is_forwarded_unchanged(deploy: Deploy, fault: Fault) -> None:
    """No failure is recorded."""
    async with deploy(pods=1) as deployment:
        deployment.engines[0].inject(fault)
        answer = await deployment.chat(opening("sand"), stream=True)
        assert answer.text == EVENT * 3
        assert await attempts(deployment, 0, "ok") == 1
        await nothing_stays_behind(deployment)


async def test_a_slow_response_does_not_hit_the_idle_timeout(deploy: Deploy) -> None:
    """A response may take longer than any timeout while data arrives."""
    async with deploy(pods=1, limits=Limits(first_byte_timeout_s=2.0, idle_timeout_s=2.0)) as deployment:
        deployment.engines[0].inject(Fault(kind=FaultKind.SLOW, pause_s=0.1))
        answer = await deployment.chat(opening("drops"), stream=True, max_tokens=24)
        assert answer.text.endswith("data: [DONE]\n\n")
        await nothing_stays_behind(deployment)


def ejections(deployment: Deployment) -> list[str]:
    """Ids of the pods that are ejected from now on."""
    ejected: list[str] = []
    deployment.program.fleet.listen(lambda pod, _, new: ejected.append(pod.id) if new is PodState.EJECTED else None)
    return ejected


async def refused_ejections(deployment: Deployment) -> float:
    lines = (await deployment.admin.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("warmroute_ejections_refused_total{"))


async def test_requests_never_eject_the_last_ready_pods(deploy: Deploy) -> None:
    """However many fail, for any number of clients; each refusal is counted, and the pods serve as soon as they can."""
    rarely = {"health_interval_s": DEADLINE_S}  # else the ejected pod is ready again if the requests take a second
    async with deploy(pods=2, probes={"doubt_window_s": 0.0, **rarely}) as deployment:
        ejected = ejections(deployment)
        for engine in deployment.engines:
            engine.inject(Fault(kind=FaultKind.STATUS, count=None))
        for n in range(20):
            headers = {"x-tenant-id": f"tenant {n}"}
            body = {"model": "demo", "messages": opening(f"ash {n}"), "max_tokens": 8}
            await deployment.client.post("/v1/chat/completions", json=body, headers=headers)
        assert await refused_ejections(deployment) > 0
        assert len(set(ejected)) == 1
        for engine in deployment.engines:
            await engine.heal()
        assert (await deployment.chat(opening("ash"))).status_code == 200
        await nothing_stays_behind(deployment)


# --- what clients do ---


async def exchange(deployment: Deployment, *sent: bytes) -> bytes:
    """Everything the router writes in response to these bytes, until it closes the connection."""
    host, port = deployment.url.removeprefix("http://").rsplit(":", 1)
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


async def test_clients_of_every_kind_are_answered(deploy: Deploy) -> None:
    """Pipelined requests, in order; `Expect: 100-continue`; HTTP/1.0, without chunks."""
    async with deploy(pods=1) as deployment:
        together = await exchange(deployment, message(chat("a"), close=False) + message(chat("b", stream=True)))
        assert together.count(b"HTTP/1.1 200 OK") == 2
        assert together.index(b'"chat.completion"') < together.index(b"text/event-stream")
        expecting = message(chat("c"), b"expect: 100-continue")
        head, _, body = expecting.partition(b"\r\n\r\n")
        assert (await exchange(deployment, head + b"\r\n\r\n", body)).startswith(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"
        )
        old = await exchange(deployment, message(chat("d", stream=True), version=b"1.0"))
        assert old.endswith(b"data: [DONE]\n\n") and b"chunked" not in old
        await nothing_stays_behind(deployment)


@pytest.mark.parametrize("encodings", [("br",), ("identity", "gzip")])
async def test_a_body_in_another_encoding_is_refused_with_a_message(deploy: Deploy, encodings: tuple[str, ...]) -> None:
    """Before the body is read; no pod sees it."""
    async with deploy(pods=1) as deployment:
        headers = [("content-encoding", encoding) for encoding in encodings]
        answer = await deployment.client.post("/v1/chat/completions", content=gzip.compress(chat("a")), headers=headers)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, zstd")
        assert await attempts(deployment, 0, "ok") == 0


async def test_the_router_listens_on_ipv6(deploy: Deploy) -> None:
    """With the same responses."""
    async with deploy(pods=1, host="::1") as deployment:
        assert (await deployment.chat(opening("isles"))).status_code == 200


async def test_bodies_up_to_the_limit_are_forwarded(deploy: Deploy) -> None:
    """Up to the limit the body reaches the pod; above it the response is 413, with a content length or chunked."""
    size = 50 * 1024 * 1024
    body = json.dumps({"model": "demo", "input": "x", "filler": "y" * size}).encode()

    async def chunked() -> Any:
        for at in range(0, len(body), 1 << 20):
            yield body[at : at + (1 << 20)]

    async with deploy(pods=1, limits=Limits(max_body_bytes=2 * size)) as deployment:
        assert (await deployment.client.post("/v1/embeddings", content=body)).status_code == 200
        await nothing_stays_behind(deployment)
    async with deploy(pods=1) as deployment:
        for content in (body, chunked()):
            try:
                answer = await deployment.client.post("/v1/embeddings", content=content)
            except httpx.WriteError:
                continue  # the client was still sending when the connection was closed
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        await nothing_stays_behind(deployment)


async def test_requests_above_the_in_flight_limit_are_refused(deploy: Deploy) -> None:
    """503 with Retry-After, in OpenAI's format; running requests continue."""
    async with deploy(pods=1, limits=Limits(max_in_flight=1)) as deployment:
        deployment.engines[0].inject(Fault(kind=FaultKind.HANG))
        hanging = asyncio.create_task(deployment.chat(opening("queues")))
        await deployment.until(lambda: bool(deployment.program.pods.state.ledger.inflight()))
        answer = await deployment.chat(opening("queues"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "saturated"
        hanging.cancel()
        await asyncio.wait([hanging])
        await nothing_stays_behind(deployment)
        assert (await deployment.chat(opening("queues"))).status_code == 200


async def test_an_incomplete_request_is_a_408(deploy: Deploy) -> None:
    """In OpenAI's format, then the connection is closed; no pod sees the request."""
    async with deploy(pods=1, limits=Limits(request_timeout_s=0.1)) as deployment:
        for sent in (message(chat("a"))[:-1], message(chat("a"))[:9]):
            answer = await exchange(deployment, sent)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert await attempts(deployment, 0, "ok") == 0


async def test_headers_that_are_too_large_are_a_431(deploy: Deploy) -> None:
    """Also when they arrive in one piece."""
    async with deploy(pods=1) as deployment:
        answer = await deployment.client.post("/v1/embeddings", json={}, headers={"x-large": "y" * 70_000})
        assert answer.status_code == 431
        assert answer.json()["error"]["code"] == "headers_too_large"
