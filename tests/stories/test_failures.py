"""Pods that fail: what the client sees, which pod the failure is recorded for, and that nothing remains."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.schema import Limits
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Deploy, Deployment, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- every fault ---


SHORT_TIMEOUTS = Limits(connect_timeout_s=DEADLINE_S, first_byte_timeout_s=0.3, idle_timeout_s=0.3)
SSE = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
RARE = {"health_interval_s": 5.0, "self_test": False}
"""No probe meets a fault that is meant for a request."""
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
    "503": Row(Fault(kind=FaultKind.STATUS, status=HTTPStatus.SERVICE_UNAVAILABLE), "upstream_broken"),
    "engine gone": Row(Fault(kind=FaultKind.CORE_DIES), "upstream_broken"),
    "reset before the headers": Row(Fault(kind=FaultKind.RESET, count=None), "upstream_broken"),
    "close after the headers": Row(raw(SSE), "upstream_broken"),
    "hang after the headers": Row(raw(SSE, "hang"), "upstream_timeout"),
    "less than content-length": Row(raw(JSON + "content-length: 99\r\n\r\n{}"), "upstream_broken", streams=False),
    "connect refused": Row(Fault(kind=FaultKind.REFUSE), "connect_failed"),
}
"""One of each kind. Responses that break off or have no end: `tests/proxy/test_connection.py`; what is tried next, and
against whom a failure counts: `tests/request/test_attempts.py`."""

AFTER_THE_FIRST_BYTE = {
    "close": (raw(SSE + CHUNK), "upstream_broken"),
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


async def mended(deployment: Deployment, at: int) -> None:
    """The pod is well, and has the usual timeouts again; nothing counts against it."""
    url, pools = deployment.engines[at].url, deployment.program.pods.pools
    [pod] = [status.pod for status in deployment.program.fleet.snapshot.pods if status.pod.url == url]
    await deployment.engines[at].heal()
    pools.remove(pod.id)
    deployment.program.pods.state.breaker.success(pod.id)
    await deployment.until(lambda: deployment.ready() == 2)


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


async def test_a_failure_before_the_first_byte_is_retried_on_another_pod(deploy: Deploy) -> None:
    """The client sees no error; the failure is recorded for that pod only."""
    async with deploy(pods=2, probes=RARE) as deployment:
        for number, (name, row) in enumerate(BEFORE_THE_FIRST_BYTE.items()):
            topic = f"{number} stones"
            at = await holder_of(deployment, topic)
            before = [await attempts(deployment, each, row.called) for each in range(2)]
            breaks(deployment, at, row.fault)
            answer = await deployment.chat(opening(topic), stream=row.streams)
            assert answer.status_code == 200, name
            assert answer.headers["x-warmroute-pod"] == deployment.engines[1 - at].url.removeprefix("http://"), name
            counted = [await attempts(deployment, each, row.called) for each in range(2)]
            assert (counted[at] - before[at], counted[1 - at] - before[1 - at]) == (1, 0), name
            await nothing_stays_behind(deployment)
            await mended(deployment, at)


async def test_a_failure_after_the_first_byte_reaches_the_client(deploy: Deploy) -> None:
    """Received data is forwarded, then an error event, and no second response."""
    async with deploy(pods=2, probes=RARE) as deployment:
        for number, (name, (fault, code)) in enumerate(AFTER_THE_FIRST_BYTE.items()):
            topic = f"{number} stones"
            at = await holder_of(deployment, topic)
            before = await attempts(deployment, at, code)
            breaks(deployment, at, fault)
            answer = await deployment.chat(opening(topic), stream=True)
            events = answer.text.strip().split("\n\n")
            assert answer.status_code == 200, name
            assert answer.text.startswith(EVENT) and answer.text.count(EVENT) == 1, name
            assert json.loads(events[-1].strip().removeprefix("event: error\ndata: "))["error"]["code"] == code, name
            assert "[DONE]" not in answer.text
            assert await attempts(deployment, at, code) == before + 1, name
            await nothing_stays_behind(deployment)
            await mended(deployment, at)


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


# --- a new life ---


async def holder_of(deployment: Deployment, topic: str) -> int:
    """Warm up a conversation; returns the index of its engine."""
    answer = await deployment.chat(opening(topic))
    pod = answer.headers["x-warmroute-pod"]
    return next(number for number, engine in enumerate(deployment.engines) if engine.url.endswith(pod))


async def test_a_restarted_engine_has_no_cached_blocks(deploy: Deploy) -> None:
    """Its event sequence restarts, so its blocks are dropped, and the next prediction is exact."""
    async with deploy(pods=1) as deployment:
        await deployment.chat(opening("clouds"))
        first_life = deployment.program.fleet.snapshot.pods[0].pod.epoch
        deployment.engines[0].inject(Fault(kind=FaultKind.RESTART))

        numbers = itertools.count()

        async def noticed() -> bool:
            await deployment.chat(opening(f"rain {next(numbers)}"))
            return deployment.program.fleet.snapshot.pods[0].pod.epoch != first_life

        await deployment.until(noticed)
        await deployment.until(deployment.all_trusted)
        answer = await deployment.chat(opening("clouds"))
        assert int(answer.headers["x-warmroute-cached-tokens"]) == 0
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
