"""A release of the chart in a real API server: Helm's commands, the routers' own view of their pods, and clients."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from ruamel.yaml import YAML

from tests.helm.charts import CHART, helm_binary
from tests.live_k8s.api_server import CORE, ApiServer, ClusterFailed, checked
from tests.live_k8s.cut_proxy import CutProxy
from tests.live_k8s.fake_node import FakeNode, RunningPod
from tests.live_k8s.rollout import is_terminating

NAME = "live"
NEWER = (
    ("Chart.yaml", "kubeVersion: .*", 'kubeVersion: ">=0.0.0-0"'),
    ("values.yaml", r"(podDisruptionBudget:\n  #.*\n  enabled: )true", r"\1false"),
    ("values.yaml", r"topologySpreadConstraints:\n(  - .*\n)+", "topologySpreadConstraints: []\n"),
)
"""What the API server is too old for, with replacements."""
PATIENCE_S = 120.0
"""For what processes must do, on a busy machine."""
POLL_S = 0.1
ATTEMPTS = re.compile(r'^warmroute_pod_requests_total\{pod="([^"]*)".*\} (\S+)', re.MULTILINE)


def values(engines: int = 3, arguments: Sequence[str] = (), **others: Any) -> dict[str, Any]:
    """Values of the chart: two routers, and mock engines with these arguments."""
    pool = {"name": "chat", "engine": "mock", "servedModelName": "demo", "replicas": engines, "args": [*arguments]}
    return {
        "config": {"unlisted_models": "engine", "limits": {"drain_delay_s": 1, "drain_timeout_s": 60}},
        "replicaCount": 2,
        "preStopSeconds": 2,
        "terminationGracePeriodSeconds": 80,
        "service": {"port": 8080},  # no kube-proxy changes the port
        "engines": {"pools": [pool]},
        **others,
    }


def copy_chart(folder: Path) -> Path:
    """The chart in this folder, for an API server that is older than the chart allows."""
    shutil.copytree(CHART, folder)
    for name, pattern, replacement in NEWER:
        path = folder / name
        text, changes = re.subn(pattern, replacement, path.read_text())
        assert changes == 1
        path.write_text(text)
    return folder


def engines_of_others(replicas: int) -> dict[str, Any]:
    """A Deployment of mock engines that is not part of the chart, and its headless Service, called `vllm`."""
    labels = {"app": "vllm", "app.kubernetes.io/component": "engine"}
    container = {
        "name": "engine",
        "image": "mock",
        "args": ["mock-engine", "--host=0.0.0.0", "--port=8000", "--model=demo", "--drain-timeout=60"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 75,
        "containers": [container],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return {
        "deployments": {"metadata": {"name": "vllm"}, "spec": spec},
        "services": {"metadata": {"name": "vllm"}, "spec": {"clusterIP": "None", "selector": labels, "ports": ports}},
    }


@dataclass
class Release:
    """One namespace with a release called `live`. `proxy` is between the routers and the API server."""

    server: ApiServer
    proxy: CutProxy
    node: FakeNode
    namespace: str
    folder: Path

    async def helm(self, *words: str | Path, values: Mapping[str, Any] | None = None) -> str:
        """What Helm prints. Raises `ClusterFailed` with its error."""
        if values is not None:
            path = self.folder / "values.yaml"
            with path.open("w") as text:
                YAML(typ="safe").dump(dict(values), text)
            words = (*words, "--values", path)
        command = [helm_binary(), *words, "--namespace", self.namespace]
        homes = {f"HELM_{what}_HOME": str(self.folder / "helm") for what in ("CACHE", "CONFIG", "DATA")}
        environment = {**os.environ, **homes, "KUBECONFIG": str(self.server.write_kubeconfig())}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
        output, error = await process.communicate()
        if process.returncode:
            raise ClusterFailed(f"helm {' '.join(map(str, words))}: {error.decode()}{output.decode()}")
        return output.decode()

    async def upgrade(self, engines: int = 3, arguments: Sequence[str] = (), **others: Any) -> None:
        """`helm upgrade` to these values."""
        new = values(engines, arguments, **others)
        await self.helm("upgrade", NAME, self.chart(), "--server-side=false", values=new)

    def chart(self) -> Path:
        """The chart, for this API server."""
        copy = self.folder / "chart"
        return copy if copy.exists() else copy_chart(copy)

    @property
    def routers(self) -> list[RunningPod]:
        """Those that the Service leads to."""
        return [one for one in self.node.pods("router") if one.ready]

    @property
    def engines(self) -> list[RunningPod]:
        return self.node.pods("engine")

    async def known_pods(self, router: RunningPod) -> dict[str, str]:
        """States of pods by name, as a router sees them."""
        return {pod["id"]: pod["state"] for pod in await self.read_admin(router, "pods")}

    async def read_admin(self, router: RunningPod, path: str) -> Any:
        """The answer of a router's admin port."""
        url = f"http://{router.container.address}:9480/admin/{path}"
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            return checked(await client.get(url, headers={"authorization": f"Bearer {self.admin_token}"}))

    async def api_status(self, token: str) -> int:
        """The status of a list of pods that is requested from the API server with this token."""
        url = f"{self.server.url}{CORE}/namespaces/{self.namespace}/pods"
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=10) as client:
            return (await client.get(url, headers={"authorization": f"Bearer {token}"})).status_code

    async def attempts(self, router: RunningPod) -> dict[str, float]:
        """How many requests a router has sent to each pod, or has tried to."""
        url = f"http://{router.container.address}:9480/metrics"
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            response = await client.get(url, headers={"authorization": f"Bearer {self.admin_token}"})
        found: dict[str, float] = {}
        for pod, count in ATTEMPTS.findall(response.raise_for_status().text):
            found[pod] = found.get(pod, 0.0) + float(count)
        return found

    @cached_property
    def admin_token(self) -> str:
        with self.server.client() as client:
            secret = checked(client.get(f"{CORE}/namespaces/{self.namespace}/secrets/{NAME}-warmroute-admin"))
        return base64.b64decode(secret["data"]["token"]).decode()

    async def settled(self, within_s: float = PATIENCE_S) -> None:
        """Wait until all pods of the release are ready, and each router uses exactly its engines."""
        await self.node.stable()
        await self.eventually(self.is_right, within_s)

    async def seconds_until_right(self) -> float:
        """How long it takes from now, less the time of a last look at all pods, which is long on a busy machine."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        await self.eventually(self.is_right)
        right_s = now_s()
        await self.is_right()
        return max(0.0, right_s - began_s - (now_s() - right_s))

    async def is_right(self) -> bool:
        """Whether all pods of the release are ready, and each router uses exactly its engines."""
        every = list(self.node.running.values())
        if not (self.routers and self.engines and all(one.ready and not is_terminating(one.pod) for one in every)):
            return False
        expected = {one.name: "ready" for one in self.engines}
        return all([await self.known_pods(one) == expected for one in self.routers])

    async def eventually(self, condition: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
        """Wait until it holds. Raises `ClusterFailed` with the state of all pods."""
        end_s = asyncio.get_running_loop().time() + within_s
        while True:
            self.node.check()
            try:
                result = condition()
                if await result if asyncio.iscoroutine(result) else result:
                    return
            except httpx.TransportError:
                pass
            if asyncio.get_running_loop().time() > end_s:
                raise ClusterFailed(f"not within {within_s:g} s; {await self._state()}")
            await asyncio.sleep(POLL_S)

    async def _state(self) -> str:
        lines = [
            f"{one.name} ready={one.ready} terminating={is_terminating(one.pod)}" for one in self.node.running.values()
        ]
        for one in self.node.pods("router"):
            try:
                lines.append(f"{one.name} knows {await self.known_pods(one)}")
            except httpx.HTTPError as error:
                lines.append(f"{one.name}: {error!r}")
            lines.append(one.container.log.read_text()[-3000:])
        return "\n".join(lines)


@asynccontextmanager
async def release(server: ApiServer, namespace: str, folder: Path) -> AsyncIterator[Release]:
    """A namespace with a node, and nothing installed."""
    with server.client() as client:
        checked(client.post(f"{CORE}/namespaces", json={"metadata": {"name": namespace}}))
    proxy = CutProxy(lambda: ("127.0.0.1", server.port))
    await proxy.start()
    try:
        async with FakeNode(server, namespace, ("127.0.0.1", proxy.port), folder / "pods") as node:
            yield Release(server, proxy, node, namespace, folder)
    finally:
        await proxy.close()
