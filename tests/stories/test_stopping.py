"""Shutdown of the router, draining of pods, and disconnecting clients."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from router.frontends.http import server
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import SLOW, Deploy, Deployment, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture(autouse=True)
def survivor() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again at its end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


async def begun(deployment: Deployment, **fields: Any) -> tuple[Any, httpx.Response]:
    """Start a stream and read its first piece; close both at the end."""
    body = {"model": "demo", "messages": opening("tides"), "stream": True, **fields}
    streaming = deployment.client.stream("POST", "/v1/chat/completions", json=body)
    answer = await streaming.__aenter__()
    await deployment.until(lambda: any(engine.load.running for engine in deployment.engines))
    return streaming, answer


class Delay:
    """The `asyncio` module for a server: a delay is over when the test says so."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await (self.is_over.wait() if delay_s else asyncio.sleep(0))


async def test_sigterm_fails_readiness_first_and_running_streams_complete(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests are still served for a while, because balancers react late."""
    delay = Delay()
    monkeypatch.setattr(server, "asyncio", delay)
    async with deploy(pods=1, engine=SLOW, delay_s=DEADLINE_S, drain_timeout_s=DEADLINE_S) as deployment:
        streaming, answer = await begun(deployment, max_tokens=100)
        signal.raise_signal(signal.SIGTERM)
        ready = await deployment.client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        assert (await deployment.admin.get("/readyz")).json()["status"] == "stopping"
        assert (await deployment.client.get("/livez")).status_code == 200
        assert (await deployment.chat(opening("late"), max_tokens=1)).status_code == 200
        delay.is_over.set()
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
        await streaming.__aexit__(None, None, None)
        assert not deployment.program.pods.state.ledger.inflight()


async def test_the_admin_listener_answers_while_streams_end(deploy: Deploy) -> None:
    """An operator sees what a stopping router still does."""
    async with deploy(pods=1, engine=SLOW, drain_timeout_s=DEADLINE_S) as deployment:
        streaming, _ = await begun(deployment, max_tokens=5000)
        signal.raise_signal(signal.SIGTERM)
        await deployment.until(lambda: deployment.server is not None and not deployment.server.servers[0].is_serving())
        assert (await deployment.admin.get("/readyz")).json()["status"] == "stopping"
        assert [pod["in_flight"] for pod in await deployment.pods()] == [1]
        await streaming.__aexit__(None, None, None)
        await deployment.until(lambda: not deployment.program.pods.state.ledger.inflight())


async def test_a_stream_longer_than_the_drain_ends_with_an_error(deploy: Deploy) -> None:
    """With an error that SDKs raise; it counts neither as served nor as a client disconnect. The log says what the stop
    cost: requests in flight when it began, requests served, streams cut off, and the time that it took."""
    with capture_logs() as lines:
        async with deploy(pods=1, engine=SLOW, drain_timeout_s=1) as deployment:
            await deployment.chat(opening("before"), max_tokens=1)
            streaming, answer = await begun(deployment, max_tokens=5000)
            signal.raise_signal(signal.SIGTERM)
            last = (await answer.aread()).strip().split(b"\n\n")[-1]
            await streaming.__aexit__(None, None, None)
            assert json.loads(last.strip().removeprefix(b"event: error\ndata: "))["error"]["code"] == "stopping"
            assert b'result="stopping"} 1.0' in deployment.program.metrics.render()
            assert not deployment.program.pods.state.ledger.inflight()
            await deployment.until(lambda: not deployment.engines[0].load.running)
    [began, ended] = [line for line in lines if line["event"] in ("draining", "stopped")]
    assert began == {
        "event": "draining",
        "log_level": "info",
        "delay_s": 0.0,
        "timeout_s": 1,
        "requests": 1,
        "cut": 0,
        "in_flight": 1,
    }
    assert (ended["event"], ended["requests"], ended["cut"], ended["in_flight"]) == ("stopped", 2, 1, 0)
    assert 1 <= ended["drain_s"] <= ended["uptime_s"]
