"""A release of the chart in a real API server: Helm's commands, the routers' own view of their pods, and clients."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
PATIENCE_S = 120.0
"""For what processes must do, on a busy machine."""
POLL_S = 0.1


def values(engines: int = 3, arguments: Sequence[str] = (), **others: Any) -> dict[str, Any]:
    """Values of the chart: two routers, and mock engines with these arguments."""
    pool = {"name": "chat", "engine": "mock", "servedModelName": "demo", "replicas": engines, "args": [*arguments]}
    return {
        "config": {"unlisted_models": "engine", "limits": {"drain_delay_s": 1, "drain_timeout_s": 60}},
        "replicaCount": 2,
        "preStopSeconds": 2,
        "terminationGracePeriodSeconds": 80,
        "service": {"port": 8080},  # no kube-proxy changes the port
        # Both are newer than this API server.
        "podDisruptionBudget": {"enabled": False},
        "topologySpreadConstraints": [],
        "engines": {"pools": [pool]},
        **others,
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
        """The chart, for this API server: Debian's is older than the chart allows."""
        copy = self.folder / "chart"
        if not copy.exists():
            shutil.copytree(CHART, copy)
            description = copy / "Chart.yaml"
            description.write_text(re.sub("kubeVersion: .*", 'kubeVersion: ">=0.0.0-0"', description.read_text()))
        return copy

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

    @property
    def admin_token(self) -> str:
        with self.server.client() as client:
            secret = checked(client.get(f"{CORE}/namespaces/{self.namespace}/secrets/{NAME}-warmroute-admin"))
        return base64.b64decode(secret["data"]["token"]).decode()

    async def settled(self, within_s: float = PATIENCE_S) -> None:
        """Wait until all pods of the release are ready, and each router uses exactly its engines."""
        await self.node.stable()

        async def right() -> bool:
            every = list(self.node.running.values())
            if not (self.routers and self.engines and all(one.ready and not is_terminating(one.pod) for one in every)):
                return False
            expected = {one.name: "ready" for one in self.engines}
            return all([await self.known_pods(one) == expected for one in self.routers])

        await self.eventually(right, within_s)

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


@dataclass
class Traffic:
    """Streams of several clients through all routers, each complete or a failure."""

    release: Release
    answer_tokens: int
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    running: int = 0
    """Answers that began and have not ended."""
    pods: dict[str, int] = field(default_factory=dict)
    """Answers that began, by pod."""

    async def more(self, answers: int) -> None:
        """Wait for this many further answers."""
        until = self.answers + answers
        await self.release.eventually(lambda: self.answers + len(self.failures) >= until)

    async def _routers(self) -> list[RunningPod]:
        while not (found := self.release.routers):
            await asyncio.sleep(POLL_S)
        return found

    async def _client(self, number: int) -> None:
        turn = 0
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            while True:
                turn += 1
                text = f"Client {number}, turn {turn}. " + "The quick brown fox jumps over the lazy dog. " * 8
                try:
                    await self._chat(client, text)
                except (httpx.HTTPError, ClusterFailed) as error:
                    self.failures.append(str(error) or repr(error))
                await asyncio.sleep(0.1)

    async def _chat(self, client: httpx.AsyncClient, text: str) -> None:
        router = random.choice(await self._routers())
        url = f"http://{router.container.address}:8080/v1/chat/completions"
        body = {
            "model": "demo",
            "stream": True,
            "max_tokens": self.answer_tokens,
            "messages": [{"role": "user", "content": text}],
        }
        async with client.stream("POST", url, json=body) as response:
            pod = response.headers.get("x-warmroute-pod", "")
            self.pods[pod] = self.pods.get(pod, 0) + 1
            self.running += 1
            try:
                received = await response.aread()
            finally:
                self.running -= 1
            if response.status_code != 200 or not received.rstrip().endswith(b"[DONE]"):
                raise ClusterFailed(f"{pod}: {response.status_code} {received[-300:]!r}")
        self.answers += 1


@asynccontextmanager
async def traffic(release: Release, clients: int = 4, answer_tokens: int = 160) -> AsyncIterator[Traffic]:
    """Clients that chat until the end of the block. 160 tokens take a second."""
    found = Traffic(release, answer_tokens)
    tasks = [asyncio.create_task(found._client(number)) for number in range(clients)]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def release(server: ApiServer, namespace: str, folder: Path) -> AsyncIterator[Release]:
    """A namespace with a node, and nothing installed."""
    with server.client() as client:
        checked(client.post(f"{CORE}/namespaces", json={"metadata": {"name": namespace}}))
    proxy = CutProxy(server.port)
    await proxy.start()
    try:
        async with FakeNode(server, namespace, ("127.0.0.1", proxy.port), folder / "pods") as node:
            yield Release(server, proxy, node, namespace, folder)
    finally:
        await proxy.close()
