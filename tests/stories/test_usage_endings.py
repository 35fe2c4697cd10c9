"""Every request of a tenant has one line of usage, however it ends, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Slo
from router.types import Endpoint
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_usage import UsageLine, lines

pytestmark = [pytest.mark.net, pytest.mark.anyio]
CLOSED: dict[str, Any] = {
    "admission": AdmissionConfig(max_wait_ms=60_000.0),
    "model": {"slo": Slo(ttft_ms=60_000.0, tpot_ms=1.0)},
}
"""Decoding leaves a twentieth of the time to prompts, so a pod is closed for 20 times a prefill."""
CHAT, RESPONSES = Endpoint.CHAT.value, Endpoint.RESPONSES.value


@asynccontextmanager
async def billed(deploy: Deploy, folder: Path, quotas: str = "", **more: Any) -> AsyncIterator[tuple[Deployment, Path]]:
    """A router in front of one pod, with the tenant `acme`, and its file of usage."""
    tenants, usage = folder / "tenants.yaml", folder / "usage.jsonl"
    tenants.write_text(f"tenants: [{{name: acme, keys: [{sha256(b'acme').hexdigest()}], quotas: [{quotas}]}}]")
    probes = {"self_test": False}  # its prompts would meet the faults and answers that a test puts into the engine
    async with deploy(more.pop("pods", 1), tenants=tenants, usage=usage, probes=probes, **more) as deployment:
        deployment.client.headers["authorization"] = "Bearer acme"
        yield deployment, usage
        await deployment.until(lambda: deployment.program.metrics.in_flight.value == 0)


def body(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


async def send(deployment: Deployment, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await deployment.client.post(CHAT, json=body(**fields), headers=headers)


def endings(found: list[UsageLine]) -> list[tuple[int, str, int]]:
    """Status, result and output tokens of each line, all of which are of the tenant."""
    assert {one.tenant for one in found} == {"acme"} and len({one.id for one in found}) == len(found)
    return [(one.status, one.result, one.output_tokens) for one in found]


def raw(content: bytes) -> Fault:
    """A pod's answer with this body."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    return Fault(kind=FaultKind.RAW, raw=(head + content).decode())


async def test_answers_and_failures_of_a_pod_have_a_line(deploy: Deploy, tmp_path: Path) -> None:
    """A pod that dies in a stream leaves what was sent; one that dies before its answer, nothing."""
    async with billed(deploy, tmp_path) as (deployment, usage):
        assert (await send(deployment)).status_code == 200
        assert (await send(deployment, stream=True, stream_options={"include_usage": True})).status_code == 200
        deployment.engines[0].inject(Fault(kind=FaultKind.CUT, after_chunks=2))
        assert "upstream_error" in (await send(deployment, stream=True)).text
        deployment.engines[0].inject(Fault(kind=FaultKind.RESET, count=None))
        assert (await send(deployment)).status_code == 502
        deployment.engines[0].faults.clear()
        deployment.engines[0].inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.UNPROCESSABLE_ENTITY))
        assert (await send(deployment)).status_code == 422
    expected = [(200, "ok", 4), (200, "ok", 4), (200, "upstream_broken", 2), (502, "upstream_broken", 0)]
    assert endings(lines(usage)) == [*expected, (422, "pod_refused", 0)]


async def test_refusals_of_the_router_have_a_line(deploy: Deploy, tmp_path: Path) -> None:
    """By the model, which counts as a request, the queue, the quota; not those that are refused before their key is
    checked, or for it."""
    async with billed(deploy, tmp_path, "{requests_per_minute: 2}", **CLOSED) as (deployment, usage):
        assert (await send(deployment, {"authorization": "Bearer unknown"})).status_code == 401
        assert (await send(deployment, model="none")).status_code == 404
        assert (await send(deployment, {"x-request-deadline-ms": "0"}, text="late " * 99)).status_code == 503
        assert (await send(deployment)).status_code == 429
        in_flight = deployment.program.edge.in_flight
        in_flight.add("", 1.0, 2 * in_flight.limit)
        assert (await send(deployment)).status_code == 503
        in_flight.give_back("", 2 * in_flight.limit)
    expected = [(404, "model_not_found", 0), (503, "overloaded", 0), (429, "rate_limit_exceeded", 0)]
    assert endings(lines(usage)) == expected


async def test_an_unknown_id_of_a_response_counts_as_a_request(deploy: Deploy, tmp_path: Path) -> None:
    """So its tenant cannot search for others."""
    async with billed(deploy, tmp_path, "{requests_per_minute: 3}", pods=2) as (deployment, _):
        found = [(await deployment.client.get(f"{RESPONSES}/resp_{number}")).status_code for number in range(5)]
    assert found == [404, 404, 404, 429, 429]
