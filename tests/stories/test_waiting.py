"""Requests that wait for a pod: one that is busy, and one that sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Slo
from router.config.schema import Limits
from router.fleet.scaling import Scaling
from router.observe.declared import of_requests
from tests.kit.deadlines import until
from tests.stories.conftest import Chat, Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- the queue ---


PATIENT = {"admission": AdmissionConfig(max_wait_ms=60_000.0), "model": {"slo": Slo(ttft_ms=60_000.0, tpot_ms=1.0)}}
"""Decoding leaves a twentieth of the time to prompts, so a pod is closed for 20 times a prefill."""


def chat(number: int, words: int = 2500) -> Chat:
    """Prompts that share nothing; 2,500 words take about 55 ms."""
    return [{"role": "user", "content": " ".join(f"{number}x{at}" for at in range(words // 4))}]


def counted(deployment: Deployment, name: str) -> float:
    """The sum of the samples of a metric."""
    metrics = deployment.program.metrics
    found = {"queued": metrics[of_requests.QUEUED].labels().value, "refused": 0.0, "waited": 0.0}
    for family in metrics[of_requests.QUEUE_REFUSED].collect():
        found["refused"] += sum(one.value for one in family.samples if one.name.endswith("_total"))
    for family in metrics[of_requests.QUEUE_S].collect():
        found["waited"] += sum(one.value for one in family.samples if one.name.endswith("_count"))
    return found[name]


async def test_a_request_waits_in_the_router_until_its_pod_is_open(deploy: Deploy, pods_open: asyncio.Event) -> None:
    """It is answered, and the time to first token that is compared with the prediction is that of the pod."""
    async with deploy(1, **PATIENT) as deployment:
        asked = [asyncio.create_task(deployment.chat(chat(number))) for number in range(2)]
        await deployment.until(lambda: counted(deployment, "queued") == 1)
        pods_open.set()
        assert [(await one).status_code for one in asked] == [200, 200]
        assert counted(deployment, "waited") == 1
        assert counted(deployment, "queued") == 0


# --- engines that sleep ---


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
