"""Engines that sleep, over real sockets: what they get, and what wakes them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from router.config.schema import Limits
from router.fleet.scaling import Scaling
from tests.kit.deadlines import until
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]
WORDS = " ".join(f"word{number}" for number in range(200))
CHAT: list[dict[str, Any]] = [{"role": "user", "content": WORDS}]


async def send_to_sleep(found: Deployment, number: int, level: int) -> None:
    """Returns when the router has seen it."""
    async with httpx.AsyncClient(base_url=found.engines[number].url) as client:
        assert (await client.post("/sleep", params={"level": level})).status_code == 200

    async def is_seen() -> bool:
        asleep = [pod for pod in await found.pods() if pod["state_reason"] == "the engine sleeps"]
        return len(asleep) == 1 and asleep[0]["state"] == "draining"

    await found.until(is_seen)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_request_wakes_the_last_pod_whose_cache_is_gone(deploy: Deploy, level: int) -> None:
    """Nor does it answer without its weights: the mock engine would refuse."""
    limits, scaling = Limits(hold_s=20), Scaling(wake_pods=True)
    async with deploy(1, engine={"wake_s": 0.2}, limits=limits, scaling=scaling) as found:
        assert (await found.chat(CHAT)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await send_to_sleep(found, 0, level)
        answer = await found.chat(CHAT)
        assert (answer.status_code, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
        await found.until(found.all_trusted)
        assert (await found.chat(CHAT)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


async def test_a_pod_that_sleeps_is_left_alone_where_the_router_may_not_wake_it(deploy: Deploy) -> None:
    async with deploy(2, engine={"wake_s": 0.0}) as found:
        await send_to_sleep(found, 1, 1)
        for _ in range(5):
            assert (await found.chat(CHAT)).status_code == 200
        assert found.ready() == 1
        async with httpx.AsyncClient(base_url=found.engines[1].url) as client:
            await client.post("/wake_up")
        await until(lambda: found.ready() == 2)
