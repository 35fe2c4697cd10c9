"""A queue in front of mock engines: requests go at once, wait, or are refused."""

from __future__ import annotations

import asyncio

import pytest

from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Slo
from router.observe.declared import of_requests
from tests.stories.conftest import Chat, Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]
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
