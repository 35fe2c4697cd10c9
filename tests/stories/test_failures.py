"""Failing pods and disconnecting clients."""

from __future__ import annotations

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
