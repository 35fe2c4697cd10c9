"""The chart as endpoint picker in a real API server: an InferencePool becomes the fleet of two pickers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.live_k8s.api_server import ApiServer, checked
from tests.live_k8s.release import NAME, Release, release, values

pytestmark = [pytest.mark.net, pytest.mark.anyio]

GROUP, CRDS = "inference.networking.k8s.io", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
SCHEMA = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "required": ["selector", "targetPorts"],
            "properties": {
                "selector": {
                    "type": "object",
                    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
                },
                "targetPorts": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"number": {"type": "integer"}}},
                },
                "endpointPickerRef": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "port": {"type": "object", "properties": {"number": {"type": "integer"}}},
                        "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"]},
                    },
                },
            },
        }
    },
}
"""The fields of an InferencePool that the chart writes, as in the definition of Gateway API's inference extension."""
DEFINITION = {
    "metadata": {
        "name": f"inferencepools.{GROUP}",
        "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
    },
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool"},
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": SCHEMA}}],
    },
}


@pytest.fixture
async def pickers(api_server: ApiServer, tmp_path: Path) -> AsyncIterator[Release]:
    async with release(api_server, "picker", tmp_path) as found:
        with api_server.client() as client:
            checked(client.post(CRDS, json=DEFINITION))

        def established() -> bool:
            with api_server.client() as client:
                kind = checked(client.get(f"{CRDS}/inferencepools.{GROUP}"))
            conditions = {one["type"]: one["status"] for one in kind.get("status", {}).get("conditions", [])}
            return conditions.get("Established") == "True"

        await found.eventually(established)
        await found.helm("install", NAME, found.chart(), "--server-side=false", values=values(picker={"enabled": True}))
        await found.settled()
        yield found


def change_pool(found: Release, spec: dict[str, Any]) -> None:
    path = f"/apis/{GROUP}/v1/namespaces/{found.namespace}/inferencepools/{NAME}-warmroute"
    with found.server.client() as client:
        checked(client.patch(path, json={"spec": spec}, headers={"content-type": "application/merge-patch+json"}))


async def test_a_pool_is_the_fleet_of_pickers(pickers: Release) -> None:
    for one in pickers.routers:
        async with grpc.aio.insecure_channel(f"{one.container.address}:9002") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"\n" + bytes([len(SERVICE)]) + SERVICE.encode()) == b"\x08\x01"  # SERVING
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://{one.container.address}:8080/livez")
    await pickers.upgrade(engines=2, picker={"enabled": True})
    await pickers.settled()
    engines = [one.name for one in pickers.engines]
    change_pool(pickers, {"targetPorts": [{"number": 8000}, {"number": 8001}]})

    async def has_both_ports() -> bool:
        ids = {f"{name}:{port}" for name in engines for port in (8000, 8001)}
        return all([set(await pickers.known_pods(one)) == ids for one in pickers.routers])

    await pickers.eventually(has_both_ports)
