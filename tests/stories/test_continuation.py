"""A client reads its stream to the end although its pod does not write it to the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.config.schema import ContinuationConfig
from router.sim.mock.faults import Fault, FaultKind
from router.types import Endpoint
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]
ON = ContinuationConfig(enabled=True, silence_s=1.0)
SLOW = {"time_scale": 1.0}
BOTH = {Endpoint.CHAT, Endpoint.COMPLETIONS}


async def proven(deployment: Deployment) -> None:
    await deployment.until(lambda: all(one.pod.continues == BOTH for one in deployment.program.fleet.snapshot.pods))


async def text_of(deployment: Deployment, **fields: Any) -> str:
    """What a client reads of a sampled stream. Fails where it is not whole."""
    body = {"model": "demo", "messages": opening("tides"), "max_tokens": 30, "stream": True, **fields}
    answer = await deployment.client.post("/v1/chat/completions", json=body)
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), answer.text[-500:]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def continued(deployment: Deployment) -> list[str]:
    """The continuations that the router has counted."""
    page = (await deployment.admin.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("warmroute_continuations_total{")]
    return [line for line in lines if not line.endswith(" 0.0")]


async def test_pods_show_at_join_that_they_continue_streams(deploy: Deploy) -> None:
    async with deploy(continuation=ON) as deployment:
        await proven(deployment)
        assert [set(pod["continues"]) for pod in await deployment.pods()] == [BOTH, BOTH]
    async with deploy() as deployment:
        assert [pod["continues"] for pod in await deployment.pods()] == [[], []]


@pytest.mark.parametrize("kind", [FaultKind.DIE, FaultKind.TERMINATE, FaultKind.CORE_DIES, FaultKind.ABORT])
async def test_stream_of_a_pod_that_fails_is_read_to_its_end(deploy: Deploy, kind: FaultKind) -> None:
    async with deploy(continuation=ON, engine=SLOW) as deployment:
        await proven(deployment)
        expected = await text_of(deployment)
        for engine in deployment.engines:
            engine.inject(Fault(kind=kind, after_chunks=20))
        assert await text_of(deployment) == expected
        counted = "".join(await continued(deployment))
        assert 'method="ids"' in counted and 'method="none"' not in counted


async def test_drained_pod_that_is_deleted_before_its_streams_end_cuts_none(deploy: Deploy) -> None:
    """As a vLLM pod whose grace period is over: it falls silent and leaves its streams open."""
    async with deploy(continuation=ON, engine={"time_scale": 4.0}) as deployment:
        await proven(deployment)
        expected = await text_of(deployment)
        reading = asyncio.create_task(text_of(deployment, messages=opening("tides")))
        await deployment.until(lambda: any(engine.load.running for engine in deployment.engines))
        (engine,) = [one for one in deployment.engines if one.load.running]
        pod = engine.url.removeprefix("http://")
        assert (await deployment.admin.post(f"/admin/pods/{pod}/drain", json={})).status_code == 200
        engine.inject(Fault(kind=FaultKind.TERMINATE, after_chunks=5))
        assert await reading == expected
