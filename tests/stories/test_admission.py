"""A queue in front of mock engines: requests go at once, wait, or are refused."""

from __future__ import annotations

import asyncio

import httpx
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


async def test_a_client_that_leaves_is_taken_out_of_the_queue(deploy: Deploy, pods_open: asyncio.Event) -> None:
    """The next one is served."""
    async with deploy(1, **PATIENT) as deployment:
        first = asyncio.create_task(deployment.chat(chat(1)))
        await deployment.until(lambda: len(deployment.program.pods.state.ledger.own()) == 1 or first.done())
        second = asyncio.create_task(deployment.chat(chat(2)))
        await deployment.until(lambda: counted(deployment, "queued") == 1)
        second.cancel()
        await deployment.until(lambda: counted(deployment, "queued") == 0)
        pods_open.set()
        assert (await first).status_code == 200
        assert (await deployment.chat(chat(3, 4))).status_code == 200


async def test_clients_that_leave_at_any_time_do_not_keep_others_waiting(deploy: Deploy) -> None:
    """Half of them leave, some while they are about to be sent."""
    async with deploy(2, **PATIENT) as deployment:
        tasks = [asyncio.create_task(deployment.chat(chat(number, 200))) for number in range(24)]
        for leaving in tasks[::2]:
            await deployment.until(lambda: counted(deployment, "queued") > 0 or all(one.done() for one in tasks))
            leaving.cancel()
        answers = await asyncio.gather(*tasks[1::2])
        assert {one.status_code for one in answers} == {200}
        await deployment.until(lambda: counted(deployment, "queued") == 0)


async def test_a_request_that_would_be_late_is_refused_with_the_time_to_come_back(deploy: Deploy) -> None:
    """By the SLO, or by the client's own deadline."""
    async with deploy(1, **PATIENT) as deployment:
        hurried = {"x-request-deadline-ms": "1"}
        body = {"model": "demo", "messages": chat(1), "max_tokens": 2}
        refused = await deployment.client.post("/v1/chat/completions", json=body, headers=hurried)
        assert refusal_of(refused) == (503, "overloaded", 1)
        anthropic = await deployment.client.post("/v1/messages", json=body, headers=hurried)
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (503, "overloaded_error")
        assert counted(deployment, "refused") == 2
        wrong = await deployment.client.post(
            "/v1/chat/completions", json=body, headers={"x-request-deadline-ms": "soon"}
        )
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")


def refusal_of(answer: httpx.Response) -> tuple[int, str, int]:
    """Status, code and Retry-After."""
    return answer.status_code, answer.json()["error"]["code"], int(answer.headers["retry-after"])
