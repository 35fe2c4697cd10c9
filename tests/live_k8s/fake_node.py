"""Does in one namespace what a cluster does around the API server: creates the pods of Deployments, gives them
addresses of the loopback network, runs their containers as processes, reports their readiness.

As a kubelet it runs `preStop`, sends SIGTERM, kills after the grace period, starts again what ended, and mounts tokens
of ServiceAccounts. While the API server is away it keeps what runs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.live_k8s.api_server import APPS, CORE, ApiServer, checked
from tests.live_k8s.container import Container, Lookup
from tests.live_k8s.rollout import OWNER, deployment_status, is_complete, is_ready, is_terminating, new_pod, next_step

Object = dict[str, Any]
STEP_S = 0.2
RESTART_S = 1.0
MERGE = {"content-type": "application/merge-patch+json"}


@dataclass
class RunningPod:
    """A pod that this node runs."""

    container: Container
    process: subprocess.Popen[bytes]
    task: asyncio.Task[None] | None = None
    ready: bool = False
    """As last reported."""
    pod: Object = field(default_factory=dict)
    """As last read."""

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    def kill(self) -> None:
        """End the process as a crash would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class FakeNode:
    """The only node. `api`: host and port of the API server, as pods see it."""

    def __init__(self, server: ApiServer, namespace: str, api: tuple[str, int], folder: Path) -> None:
        self._server = server
        self._namespace = namespace
        self._root = f"{CORE}/namespaces/{namespace}"
        self._api = api
        self._folder = folder
        self._numbers = itertools.count(1)
        self._client = httpx.AsyncClient(
            base_url=server.url, headers=dict(server.client().headers), verify=False, trust_env=False, timeout=10
        )
        self._probes = httpx.AsyncClient(trust_env=False, timeout=2)
        self._task: asyncio.Task[None] | None = None
        self._steps = 0
        self._changed = True
        self.service_address = ""
        """Where the router's Service is, if it has another port than the router."""
        self._statuses: dict[str, Object] = {}
        """The statuses of Deployments, as last written."""
        self.running: dict[str, RunningPod] = {}
        """By uid."""
        self.tokens: list[str] = []
        """Names of the Secrets that tokens of ServiceAccounts are bound to."""

    async def __aenter__(self) -> FakeNode:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._task, *(one.task for one in self.running.values())]
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        for one in self.running.values():
            one.kill()
        await self._client.aclose()
        await self._probes.aclose()

    def pods(self, component: str) -> list[RunningPod]:
        """The pods of a component that are not stopping."""
        return [
            one
            for one in self.running.values()
            if one.pod["metadata"]["labels"].get("app.kubernetes.io/component") == component
            and not is_terminating(one.pod)
        ]

    def check(self) -> None:
        """Raise what has ended the node's own tasks."""
        for task in [self._task, *(one.task for one in self.running.values())]:
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def delete(self, one: RunningPod) -> None:
        """Delete a pod as `kubectl delete` does: it may complete its answers."""
        await self._delete(one.pod)

    async def lose(self, one: RunningPod) -> None:
        """End a pod at once and for good, as with its machine; another one replaces it."""
        if one.task is not None:
            one.task.cancel()
        one.kill()
        body = {"gracePeriodSeconds": 0}
        checked(await self._client.request("DELETE", f"{self._root}/pods/{one.name}", json=body))

    async def expire_tokens(self) -> None:
        """Let the API server refuse all tokens of now."""
        while self.tokens:
            checked(await self._client.delete(f"{self._root}/secrets/{self.tokens.pop()}"))

    async def renew_accounts(self) -> None:
        """Replace the token and the authority in the files of all pods."""
        for one in self.running.values():
            if _has_account(one.pod):
                one.container.write_account(await self._account(one.pod))

    async def stable(self) -> None:
        """Wait until all Deployments of now have their pods."""
        seen = self._steps + 1
        while self._steps <= seen or self._changed:
            self.check()
            await asyncio.sleep(STEP_S)

    async def _run(self) -> None:
        while True:
            with suppress(httpx.TransportError):
                self._changed = await self._step()
                self._steps += 1
            await asyncio.sleep(STEP_S)

    async def _step(self) -> bool:
        """Returns whether pods are yet to be created or deleted."""
        changed = False
        pods = checked(await self._client.get(f"{self._root}/pods"))["items"]
        deployments = checked(await self._client.get(f"{APPS}/namespaces/{self._namespace}/deployments"))["items"]
        owned: dict[str, list[Object]] = {one["metadata"]["name"]: [] for one in deployments}
        for pod in pods:
            owner = pod["metadata"].get("annotations", {}).get(OWNER)
            if owner in owned:
                owned[owner].append(pod)
            elif owner is not None and not is_terminating(pod):
                changed = True
                await self._delete(pod)
        for deployment in deployments:
            found = owned[deployment["metadata"]["name"]]
            create, surplus = next_step(deployment, found)
            changed = changed or not is_complete(deployment, found)
            await self._report_deployment(deployment, found)
            if create:
                pod = new_pod(deployment, next(self._numbers))
                checked(await self._client.post(f"{self._root}/pods", json=pod))
            for pod in surplus:
                await self._delete(pod)
        for pod in pods:
            await self._keep(pod)
        for uid in self.running.keys() - {pod["metadata"]["uid"] for pod in pods}:
            self._forget(self.running.pop(uid))
        return changed

    async def _report_deployment(self, deployment: Object, pods: Sequence[Object]) -> None:
        name, status = deployment["metadata"]["name"], deployment_status(deployment, pods)
        if self._statuses.get(name) != status:
            path = f"{APPS}/namespaces/{self._namespace}/deployments/{name}/status"
            checked(await self._client.patch(path, json={"status": status}, headers=MERGE))
            self._statuses[name] = status

    def _forget(self, one: RunningPod) -> None:
        """End a pod that is gone: it was deleted at once, or has stopped."""
        if one.task is not None:
            one.task.cancel()
        one.kill()

    async def _delete(self, pod: Object) -> None:
        await self._client.delete(f"{self._root}/pods/{pod['metadata']['name']}")

    async def _keep(self, pod: Object) -> None:
        """Run a pod that does not run, and remember its state."""
        uid = pod["metadata"]["uid"]
        if known := self.running.get(uid):
            known.pod = pod
            if (lookup := await self._volumes(pod)) is not None:
                known.container.write_files(lookup)
        elif pod["spec"].get("nodeName") is None:
            target = {"target": {"kind": "Node", "name": "node-1"}, "metadata": {"name": pod["metadata"]["name"]}}
            checked(await self._client.post(f"{self._root}/pods/{pod['metadata']['name']}/binding", json=target))
        elif pod.get("status", {}).get("phase") == "Pending":
            if (lookup := await self._volumes(pod)) is not None:
                container = await self._container(pod, lookup)
                self.running[uid] = found = RunningPod(container, container.start(), pod=pod)
                found.task = asyncio.create_task(self._live(found))

    async def _container(self, pod: Object, lookup: Lookup) -> Container:
        number = next(self._numbers)
        network = self._server.port % 250 + 1  # another one for each cluster
        address = f"127.{network}.{number // 250}.{number % 250 + 1}"
        environment = {"KUBERNETES_SERVICE_HOST": self._api[0], "KUBERNETES_SERVICE_PORT": str(self._api[1])}
        container = Container(pod, address, self._folder / pod["metadata"]["name"], environment)
        container.write_files(lookup)
        container.write_hosts(self._services())
        if _has_account(pod):
            container.write_account(await self._account(pod))
        return container

    async def _volumes(self, pod: Object) -> Lookup | None:
        """The content of the ConfigMaps and Secrets that a pod mounts; None if one does not exist."""
        found: dict[tuple[str, str], Mapping[str, str]] = {}
        for volume in pod["spec"].get("volumes", ()):
            for kind, name in (
                ("configmaps", volume.get("configMap", {}).get("name")),
                ("secrets", volume.get("secret", {}).get("secretName")),
            ):
                if name:
                    response = await self._client.get(f"{self._root}/{kind}/{name}")
                    if response.status_code == 404:
                        return None
                    found[kind, name] = checked(response).get("data") or {}
        return lambda kind, name: found[kind, name]

    async def _account(self, pod: Object) -> Mapping[str, str]:
        """A token and what belongs to it. It is bound to a Secret, not to its pod: without the Secret it is refused, as
        an expired one is."""
        name = f"token-{next(self._numbers)}"
        self.tokens.append(name)
        secret = checked(await self._client.post(f"{self._root}/secrets", json={"metadata": {"name": name}}))
        bound = {"kind": "Secret", "apiVersion": "v1", "name": name, "uid": secret["metadata"]["uid"]}
        request = {"spec": {"expirationSeconds": 3607, "boundObjectRef": bound}}
        path = f"{self._root}/serviceaccounts/{pod['spec']['serviceAccountName']}/token"
        token = checked(await self._client.post(path, json=request))["status"]["token"]
        return {"token": token, "ca.crt": self._server.ca_file.read_text(), "namespace": self._namespace}

    def _services(self) -> dict[str, str]:
        """The Service of the router leads to one that is ready, or to `service_address`."""
        for one in self.pods("router"):
            if one.ready:
                name = one.pod["metadata"]["annotations"][OWNER]
                return {f"{name}.{self._namespace}.svc": self.service_address or one.container.address}
        return {}

    async def _live(self, one: RunningPod) -> None:
        """Report the pod's readiness until it is deleted; then stop it."""
        while not is_terminating(one.pod):
            await self._report(one)
            await asyncio.sleep(STEP_S)
            if one.process.poll() is not None and not is_terminating(one.pod):
                if one.pod["spec"].get("restartPolicy") == "Never":
                    break
                await self._report(one)
                await asyncio.sleep(RESTART_S)
                one.process = one.container.start()
        if is_terminating(one.pod):
            await self._stop(one)
        else:
            phase = "Failed" if one.process.returncode else "Succeeded"
            await self._persist(*_status(one, phase, ready=False))
        while not is_terminating(one.pod):
            await asyncio.sleep(STEP_S)
        uid = one.pod["metadata"]["uid"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        await self._persist("DELETE", f"/pods/{one.name}", options)
        del self.running[uid]

    async def _report(self, one: RunningPod) -> None:
        """Without the API server it is tried again with the next probe."""
        ready = await self._is_ready(one)
        if ready != is_ready(one.pod) or one.pod.get("status", {}).get("phase") == "Pending":
            await self._write(*_status(one, "Running", ready=ready))
        one.ready = ready

    async def _persist(self, method: str, path: str, body: Object) -> None:
        """Write until the API server is there."""
        while not await self._write(method, path, body):
            await asyncio.sleep(STEP_S)

    async def _write(self, method: str, path: str, body: Object) -> bool:
        """Whether the API server was there. A pod that is gone needs nothing."""
        try:
            headers = MERGE if method == "PATCH" else None
            response = await self._client.request(method, self._root + path, json=body, headers=headers)
        except httpx.TransportError:
            return False
        if response.status_code not in (404, 409) and response.status_code < 500:
            checked(response)
        return response.status_code < 500

    async def _is_ready(self, one: RunningPod) -> bool:
        probe = one.container.spec.get("readinessProbe", {}).get("httpGet")
        if one.process.poll() is not None or probe is None:
            return one.process.poll() is None
        [port] = [port["containerPort"] for port in one.container.spec["ports"] if port["name"] == probe["port"]]
        try:
            return (await self._probes.get(f"http://{one.container.address}:{port}{probe['path']}")).is_success
        except httpx.HTTPError:
            return False

    async def _stop(self, one: RunningPod) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + one.pod["metadata"]["deletionGracePeriodSeconds"]
        hook = one.container.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        steps = [one.container.run_hook(hook["command"])] if hook and one.process.poll() is None else []
        for process in [*steps, one.process]:
            if process is one.process:
                process.terminate()
            while process.poll() is None and loop.time() < end_s:
                await asyncio.sleep(STEP_S)
        one.kill()


def _has_account(pod: Object) -> bool:
    return bool(pod["spec"].get("automountServiceAccountToken", True))


def _status(one: RunningPod, phase: str, *, ready: bool) -> tuple[str, str, Object]:
    """The request that reports a pod."""
    address = one.container.address
    conditions = [{"type": "Ready", "status": str(ready)}]
    state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": one.process.returncode}}
    container = {"name": one.container.spec["name"], "image": "", "imageID": "", "restartCount": 0}
    status = {
        "phase": phase,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": conditions,
        "containerStatuses": [{**container, "ready": ready, "state": state}],
    }
    return "PATCH", f"/pods/{one.name}/status", {"status": status}
