"""Failing pods and disconnecting clients."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

SLOW: dict[str, Any] = {"time_scale": 1.0}


async def holder_of(deployment: Deployment, topic: str) -> int:
    """Warm up a conversation; returns the index of its engine."""
    answer = await deployment.chat(opening(topic))
    pod = answer.headers["x-warmroute-pod"]
    return next(number for number, engine in enumerate(deployment.engines) if engine.url.endswith(pod))


async def test_a_killed_pod_costs_no_unstreamed_request(deploy: Deploy) -> None:
    """Twenty requests run on two pods when one dies: all twenty are answered."""
    async with deploy(pods=2, engine=SLOW) as deployment:
        asked = [asyncio.create_task(deployment.chat(opening(f"road {n}"), max_tokens=20)) for n in range(20)]
        await deployment.until(lambda: all(engine.load.running for engine in deployment.engines))
        await deployment.engines[0].stop()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 20
        assert not deployment.program.pods.state.ledger.inflight()


async def test_an_ejected_pod_is_readmitted_when_it_responds_again(deploy: Deploy) -> None:
    """An unhealthy pod gets no requests. Once healthy it is probed, tested again and used."""
    async with deploy(pods=1) as deployment:
        deployment.engines[0].inject(Fault(kind=FaultKind.UNHEALTHY, count=None))
        await deployment.until(lambda: deployment.ready() == 0)
        await deployment.engines[0].heal()
        await deployment.until(deployment.all_trusted)
        assert (await deployment.chat(opening("fields"))).status_code == 200


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
