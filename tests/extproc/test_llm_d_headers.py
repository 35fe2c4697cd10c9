"""Request headers of llm-d: what they mean here, and which of them never reach a pod."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("grpc")

from router.admission.admission_queue import AdmissionConfig
from router.frontends.extproc.gateway_exchange import GatewayExchange
from tests.extproc.conftest import Pick, Picking, chat

pytestmark = [pytest.mark.net, pytest.mark.anyio]
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
SLO = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")


@asynccontextmanager
async def reading(picker: Pick, priorities: dict[bytes, int], **config: object) -> AsyncIterator[Picking]:
    """A picker that knows these priorities."""
    async with picker(**config) as picking:
        terms = picking.server._terms
        picking.server._terms = terms._replace(priority=lambda name: priorities.get(name, 0))
        yield picking


def served(picking: Picking) -> GatewayExchange:
    """The request in progress."""
    [exchange] = picking.server._exchanges
    return exchange


@pytest.mark.parametrize("header", OBJECTIVE)
async def test_an_objective_gives_its_requests_their_priority(picker: Pick, header: str) -> None:
    async with reading(picker, {b"batch": -5}) as picking:
        for name, band in (("batch", -5), ("unknown", 0)):
            stream = picking.stream()
            await stream.ask(headers={header: name})
            assert served(picking).admitted.tenant.band == band
            await stream.respond()
            await stream.end()
            await picking.until(lambda: not picking.server.streams)


async def test_a_client_of_a_tenant_keeps_the_band_of_its_tenant(picker: Pick, tmp_path: Path) -> None:
    """Objectives are names that any client may send."""
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants:\n- {{name: acme, band: 1, keys: [{sha256(b'key').hexdigest()}]}}\n")
    async with reading(picker, {b"chat": 10}, tenants=str(file)) as picking:
        await picking.stream().ask(headers={"authorization": "Bearer key", OBJECTIVE[0]: "chat"})
        assert served(picking).admitted.tenant.band == 1


@pytest.mark.parametrize("header", FAIRNESS)
async def test_a_fairness_id_is_the_tenant_where_none_is_configured(picker: Pick, header: str) -> None:
    async with picker() as picking:
        await picking.stream().ask(headers={header: "team-a"})
        [(recorded, _)] = picking.program.records.recent.latest(1)
        assert recorded.scene.tenant == "team-a"


@pytest.mark.parametrize("header", SLO)
async def test_a_slo_is_the_deadline_of_the_first_token(picker: Pick, header: str) -> None:
    async with picker(admission=AdmissionConfig()) as picking:
        assert (await picking.stream().ask(headers={header: "soon"})).status == 400
        assert (await picking.stream().ask(headers={header: "60000"})).picked


async def test_headers_by_which_a_client_could_steer_the_gateway_or_pods_are_overwritten(picker: Pick) -> None:
    steering = (
        *("x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
        "x-data-parallel-host-port",
    )
    given = dict.fromkeys((*steering, "x-gateway-destination-endpoint"), "10.9.9.9:1")
    async with picker(3) as picking:
        answer = await picking.stream().ask(chat(), headers=given)
        assert answer.picked[0] in picking.pods and answer.removed >= {name.encode() for name in steering}


@pytest.mark.parametrize("header", ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"])
async def test_the_gateway_may_name_another_model_than_the_body(picker: Pick, header: str) -> None:
    """As a route does that sends a share of the requests to a new model. Each goes to a pod of its model."""
    async with picker(models=("demo", "new")) as picking:
        for model, pod in zip(("demo", "new"), picking.pods, strict=True):
            assert (await picking.stream().ask(chat(model=model))).picked == [pod]
        answer = await picking.stream().ask(chat(temperature=0.5), headers={header: "new"})
        assert answer.picked == [picking.pods[1]] and header.encode() in answer.removed
        assert msgspec.json.decode(answer.body) == msgspec.json.decode(chat(model="new", temperature=0.5))
        assert (await picking.stream().ask(headers={header: "nope"})).status == 404
        assert (await picking.stream().ask(b"[1]", headers={header: "new"})).status == 400


async def test_a_tenant_cannot_reach_a_model_by_a_header_that_it_may_not_use(picker: Pick, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants:\n- {{name: acme, models: [demo], keys: [{sha256(b'key').hexdigest()}]}}\n")
    async with picker(models=("demo", "new"), tenants=str(file)) as picking:
        given = {"authorization": "Bearer key", "x-llm-d-model-name-rewrite": "new"}
        assert (await picking.stream().ask(headers=given)).status == 404
