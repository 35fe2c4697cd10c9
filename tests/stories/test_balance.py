"""Work is spread over pods, also when all prompts share a prefix."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.pace import slowness
from tests.stories.conftest import Chat, Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

SYSTEM = "You answer questions about the harbour. " * 250
REQUESTS = 160
AT_ONCE = 8
TICK_S = 0.01


def shared_chat(number: int) -> Chat:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number}: " + f"boat {number} " * 40}]


async def ask_all(deployment: Deployment, numbers: range) -> list[httpx.Response]:
    """Send all requests, a few at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> httpx.Response:
        async with gate:
            return await deployment.chat(shared_chat(number))

    return await asyncio.gather(*map(ask, numbers))


@contextmanager
def stopwatch() -> Iterator[list[None]]:
    """The ticks of the event loop while the block runs. A time in which the whole process is stopped is one tick."""
    ticks = list[None]()

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            ticks.append(None)

    ticking = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        ticking.cancel()


def uncached(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    work: int = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] + usage["completion_tokens"]
    return work


@pytest.mark.parametrize("policy", ["cost_aware", "ring_bounded_load"])
async def test_a_prefix_shared_by_all_requests_uses_every_pod(deploy: Deploy, policy: str) -> None:
    """With a fully shared prefix on 4 pods, no pod has over 1.5x the mean work, and hits reach 90 % of the ideal."""
    async with deploy(pods=4, policy=policy, engine={"time_scale": 0.1}) as deployment:
        answers = await ask_all(deployment, range(REQUESTS))
        work: Counter[str] = Counter()
        for answer in answers:
            work[answer.headers["x-warmroute-pod"]] += uncached(answer)
        cached = sum(a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
        ideal = max(a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers) * (REQUESTS - 1)
        assert max(work.values()) <= 1.5 * sum(work.values()) / 4, work
        assert cached >= 0.9 * ideal, (cached, ideal)


async def test_a_fifth_pod_gets_traffic_within_a_second(deploy: Deploy) -> None:
    """Added by an admin call under load."""
    async with deploy(pods=5, engine={"time_scale": 0.1}) as deployment:
        fifth = deployment.engines[4].url.removeprefix("http://")
        assert (await deployment.admin.delete(f"/admin/pods/{fifth}")).status_code == 200
        assert all(a.headers["x-warmroute-pod"] != fifth for a in await ask_all(deployment, range(40)))
        with stopwatch() as ticks:
            assert (await deployment.admin.post("/admin/pods", json={"url": f"http://{fifth}"})).status_code == 201
            number = 1000
            while fifth not in {
                a.headers["x-warmroute-pod"] for a in await ask_all(deployment, range(number, number + 20))
            }:
                number += 20
        assert len(ticks) * TICK_S < slowness()
