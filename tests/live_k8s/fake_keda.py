"""Scales a Deployment as KEDA does: by the queries of its ScaledObject, which a real Prometheus computes from what it
scrapes of the routers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import httpx

from loadtest.commands.child_processes import free_port, stop_process
from tests.live_k8s.api_server import APPS, ApiServer, checked
from tests.live_k8s.fake_node import MERGE
from tests.live_k8s.release import Release

GROUP, VERSION, KIND = "keda.sh", "v1alpha1", "ScaledObject"
PROMETHEUS = Path(sys.executable).with_name("prometheus")
SCRAPE_S = 1
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{KIND.lower()}s.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": f"{KIND.lower()}s", "singular": KIND.lower(), "kind": KIND},
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


async def define(server: ApiServer) -> None:
    """Let the API server know ScaledObjects."""
    with server.client() as client:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        if client.get(f"{path}/{DEFINITION['metadata']['name']}").status_code == 404:  # type: ignore[index]
            checked(client.post(path, json=DEFINITION))
        while client.get(f"/apis/{GROUP}/{VERSION}").is_error:
            await asyncio.sleep(0.1)


@dataclass
class Prometheus:
    """A Prometheus that scrapes the routers of a release."""

    url: str

    async def ask(self, query: str) -> float | None:
        """The value of a query whose result is one series or none."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            answer = checked(await client.get(f"{self.url}/api/v1/query", params={"query": query}))
        found = answer["data"]["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


@asynccontextmanager
async def prometheus(release: Release, folder: Path) -> AsyncIterator[Prometheus]:
    """Scrapes as a PodMonitor of the chart makes it do, every second."""
    targets = [
        {
            "targets": [f"{one.container.address}:9480"],
            "labels": {"namespace": release.namespace, "container": "router", "pod": one.name},
        }
        for one in release.routers
    ]
    job = {"job_name": "routers", "static_configs": targets, "authorization": {"credentials": release.admin_token}}
    times = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    (folder / "prometheus.yml").write_text(json.dumps({"global": times, "scrape_configs": [job]}))
    port = free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = _started(command, folder / "prometheus.log")
    found = Prometheus(f"http://127.0.0.1:{port}")

    async def scrapes() -> bool:
        return await found.ask("count(up == 1)") == len(targets)

    try:
        await release.eventually(scrapes)
        yield found
    finally:
        stop_process(process)


@dataclass
class FakeKeda:
    """Follows the ScaledObjects of a namespace."""

    release: Release
    prometheus: Prometheus

    async def run(self) -> None:
        """Until cancelled."""
        idle_since_s: dict[str, float] = {}
        server = self.release.server
        headers = dict(server.client().headers)
        async with httpx.AsyncClient(base_url=server.url, headers=headers, verify=False, trust_env=False) as client:
            while True:
                path = f"/apis/{GROUP}/{VERSION}/namespaces/{self.release.namespace}/{KIND.lower()}s"
                for one in checked(await client.get(path))["items"]:
                    await self._follow(client, one["spec"], idle_since_s)
                await asyncio.sleep(SCRAPE_S)

    async def _follow(self, client: httpx.AsyncClient, spec: Mapping[str, Any], idle_since_s: dict[str, float]) -> None:
        name, now_s = spec["scaleTargetRef"]["name"], asyncio.get_running_loop().time()
        path = f"{APPS}/namespaces/{self.release.namespace}/deployments/{name}/scale"
        replicas = checked(await client.get(path))["spec"].get("replicas", 0)
        metadata = [trigger["metadata"] for trigger in spec["triggers"]]
        values = [await self.prometheus.ask(one["query"]) for one in metadata]
        active = [
            value is not None and value > float(one["activationThreshold"])
            for one, value in zip(metadata, values, strict=True)
        ]
        if any(active) or None in values or not replicas:
            idle_since_s.pop(name, None)
        if any(active):
            wanted = [
                ceil(value / float(one["threshold"])) for one, value in zip(metadata, values, strict=True) if value
            ]
            least = max(1, spec["minReplicaCount"])
            new = min(max(least, *wanted), spec["maxReplicaCount"])
        elif None in values:
            new = replicas  # an error
        elif now_s - idle_since_s.setdefault(name, now_s) >= spec["cooldownPeriod"]:
            new = spec["minReplicaCount"]
        else:
            new = replicas
        if new > replicas or new == spec["minReplicaCount"]:  # an HPA waits before it stops some
            checked(await client.patch(path, json={"spec": {"replicas": new}}, headers=MERGE))


@asynccontextmanager
async def keda(release: Release, source: Prometheus) -> AsyncIterator[None]:
    task = asyncio.create_task(FakeKeda(release, source).run())
    try:
        yield
        assert not task.done(), task.result()
    finally:
        task.cancel()
