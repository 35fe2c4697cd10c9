"""Who gets an answer when the router stops, when a pod is drained, and when clients leave?"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from router.config.schema import Limits
from router.sim.mock_engine import Fault, FaultKind
from router.types import PodState
from tests.stories.conftest import City, OpenCity
from tests.stories.test_failures import SLOW, holder_of
from tests.stories.test_fault_matrix import message, nothing_stays_behind
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture(autouse=True)
def survivor() -> Iterator[None]:
    """uvicorn ends with the signal that it was ended with; these tests go on."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


async def begun(city: City, **fields: Any) -> tuple[Any, httpx.Response]:
    """A stream whose first piece has come; close the first when done."""
    body = {"model": "demo", "messages": opening("tides"), "stream": True, **fields}
    streaming = city.client.stream("POST", "/v1/chat/completions", json=body)
    answer = await streaming.__aenter__()
    await city.until(lambda: any(engine.load.running for engine in city.engines))
    return streaming, answer


async def test_on_sigterm_readiness_falls_first_and_running_streams_end_well(open_city: OpenCity) -> None:
    """For a while new requests are still served, for those who have not heard of it."""
    async with open_city(pods=1, engine=SLOW, delay_s=0.3, patience_s=20) as city:
        streaming, answer = await begun(city, max_tokens=100)
        signal.raise_signal(signal.SIGTERM)
        ready = await city.client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "stopping")
        assert (await city.client.get("/livez")).status_code == 200
        assert (await city.chat(opening("late"), max_tokens=1)).status_code == 200
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
        await streaming.__aexit__(None, None, None)
        assert not city.program.pods.ledger.inflight()


async def test_a_stream_that_outlasts_the_drain_is_told_why_it_ends(open_city: OpenCity) -> None:
    """With an error that SDKs raise on; it counts neither as served nor as a client that left."""
    async with open_city(pods=1, engine=SLOW, patience_s=1) as city:
        streaming, answer = await begun(city, max_tokens=5000)
        signal.raise_signal(signal.SIGTERM)
        last = (await answer.aread()).strip().split(b"\n\n")[-1]
        await streaming.__aexit__(None, None, None)
        assert json.loads(last.strip().removeprefix(b"data: "))["error"]["code"] == "stopping"
        assert b'result="stopped"} 1.0' in city.program.metrics.render()
        assert not city.program.pods.ledger.inflight()
        await city.until(lambda: not city.engines[0].load.running)


async def test_a_drained_pod_ends_what_it_has_and_gets_nothing_new(open_city: OpenCity) -> None:
    """Undrained, it proves itself and serves again."""
    async with open_city(pods=2, engine=SLOW) as city:
        streaming, answer = await begun(city, max_tokens=100)
        pod = answer.headers["x-warmroute-pod"]
        drained = await city.client.post(f"/admin/pods/{pod}/drain")
        assert drained.json() == {"status": "draining", "pod": pod}
        others = [await city.chat(opening("tides"), max_tokens=1) for _ in range(3)]
        assert pod not in {other.headers["x-warmroute-pod"] for other in others}
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
        await streaming.__aexit__(None, None, None)
        assert (await city.client.post(f"/admin/pods/{pod}/undrain")).json()["status"] == "joining"
        await city.until(lambda: city.ready() == 2)
        assert (await city.client.post("/admin/pods/none/drain")).status_code == 404


async def test_a_client_that_never_reads_is_given_up_with_its_pod(open_city: OpenCity) -> None:
    """The pod is made to wait first, so that little is held; it counts as a client that left."""
    answer_bytes = 50_000_000
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {answer_bytes}\r\n\r\n"
    async with open_city(pods=1, limits=Limits(write_timeout_s=0.2)) as city:
        city.engines[0].inject(Fault(kind=FaultKind.RAW, raw=head + "x" * answer_bytes, then="hang"))
        host, port = city.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({"model": "demo", "messages": opening("deserts"), "stream": True}).encode()
        writer.write(message(body))
        await city.until(lambda: bool(city.program.pods.ledger.inflight()))
        await nothing_stays_behind(city)
        assert 'result="client_gone"} 1.0' in city.program.metrics.render().decode()
        assert not city.program.pods.breaker._records
        writer.transport.abort()


async def running(city: City) -> None:
    await city.until(lambda: any(engine.load.running for engine in city.engines))


async def hanging(city: City) -> None:
    await city.until(lambda: bool(city.program.pods.ledger.inflight()))


@pytest.mark.parametrize("phase", ["inside its body", "before any answer", "before the first token", "in mid-stream"])
async def test_a_client_may_leave_in_any_phase(open_city: OpenCity, phase: str) -> None:
    """Counted as having left, once; the pod stops, is not blamed, and no place stays taken."""
    async with open_city(pods=2, engine=SLOW) as city:
        at = await holder_of(city, "winds")
        body = json.dumps({"model": "demo", "messages": opening("winds"), "max_tokens": 5000, "stream": True}).encode()
        if phase == "before any answer":
            city.engines[at].inject(Fault(kind=FaultKind.HANG))
        host, port = city.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(message(body)[:-1] if phase == "inside its body" else message(body))
        if phase == "inside its body":
            await city.until(lambda: bool(city.server and city.server.server_state.connections))
        elif phase == "in mid-stream":
            await reader.readuntil(b"data: ")
        else:
            await (hanging if phase == "before any answer" else running)(city)
        writer.transport.abort()
        left = 'result="client_gone"} 1.0'
        await city.until(lambda: left in city.program.metrics.render().decode())
        await city.until(lambda: not any(engine.load.running for engine in city.engines))
        await nothing_stays_behind(city)
        assert all(status.state is PodState.READY for status in city.program.fleet.snapshot.pods)
        assert not city.program.pods.breaker._records
