"""A Kubernetes API server in memory: lists, pages and watches pods, and misbehaves on request.

It follows the API in what a client can see: resource versions that grow, watches that continue from one, 410 for old
ones in both forms, bookmarks, watches that end after `timeoutSeconds`. `Faults` are what happened in real clusters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import httpx

from router.errors import ConnectFailed
from router.types import PodTls

Object = dict[str, Any]
PODS, POOLS, OBJECTIVES = "pods", "inferencepools", "inferenceobjectives"
BOOKMARK_S = 20.0


@dataclass
class Faults:
    """What goes wrong. Numbers count down."""

    down: bool = False
    """Connections are refused."""
    status: int = 0
    """Every request is refused with it, or those of `refused_verb`."""
    refused_verb: str = ""
    retry_after_s: int = 0
    silent: bool = False
    """Open and new watches send nothing and never end."""
    drop: int = 0
    """The next events are lost."""
    repeat: bool = False
    """Every event is sent twice, the second time after the next one."""
    forget: bool = False
    """Only the latest version can be watched: 410 as a status, or inside of the stream."""
    forget_in_stream: bool = False
    denied: frozenset[str] = frozenset()
    """What the ServiceAccount may not do, such as `get inferencepools`."""
    close_old: bool = False
    """A watch of another version than the latest ends at once, without an error."""


@dataclass
class FakeKubernetes:
    """The cluster."""

    faults: Faults = field(default_factory=Faults)
    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    """By resource, namespace and name."""
    requests: list[httpx.Request] = field(default_factory=list)
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    page: int = 1000
    _version: int = 100
    _uids: int = 0
    _history: list[tuple[int, str, str, Object]] = field(default_factory=list)
    _wakers: set[asyncio.Event] = field(default_factory=set)
    _close: int = 0

    def connect(self, url: str, _tls: PodTls) -> FakeConnections:
        return FakeConnections(self, url)

    # --- what people and controllers do ---

    def put_pod(self, name: str, *, ready: bool = True, namespace: str = "ns", **fields: Any) -> Object:
        """Add or change a pod. `fields`: labels, annotations, node, ip, containers, phase."""
        known = self.objects.get((PODS, namespace, name))
        self._uids += known is None
        number = self._uids
        pod = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": known["metadata"]["uid"] if known else f"uid-{number}",
                "creationTimestamp": known["metadata"]["creationTimestamp"] if known else f"2026-01-01T{number:06d}Z",
                "labels": fields.get("labels", {"app": "vllm"}),
                "annotations": fields.get("annotations"),
                "managedFields": [{"manager": "kubelet"}] * 3,
            },
            "spec": {
                "nodeName": fields.get("node", "node-1"),
                "containers": fields.get("containers", [{"name": "engine", "image": "vllm/vllm-openai:v1"}]),
            },
            "status": {
                "phase": fields.get("phase", "Running"),
                "podIP": fields.get("ip", known["status"]["podIP"] if known else f"10.0.0.{number}"),
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            },
        }
        return self._put(PODS, pod)

    def put_pool(self, name: str, *ports: int, namespace: str = "ns", **labels: str) -> Object:
        """Add or change an InferencePool."""
        spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]}
        return self._put(POOLS, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})

    def put_objective(self, name: str, pool: str, priority: int | None, group: str, namespace: str = "ns") -> Object:
        """Add or change an InferenceObjective; `group` is its API group."""
        spec = {"poolRef": {"name": pool}} | ({} if priority is None else {"priority": priority})
        meta = {"name": name, "namespace": namespace}
        return self._put(f"{group}/{OBJECTIVES}", {"metadata": meta, "spec": spec})

    def terminate(self, name: str, namespace: str = "ns") -> None:
        """The begin of a deletion with a grace period."""
        pod = deepcopy(self.objects[PODS, namespace, name])
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
        self._put(PODS, pod)

    def delete(self, name: str, namespace: str = "ns", resource: str = PODS) -> None:
        gone = self.objects.pop((resource, namespace, name), None)
        if gone is not None:
            self._record("DELETED", resource, gone)

    def lie(self, kind: str, name: str, namespace: str = "ns") -> None:
        """Send an event about a pod that is not true: it is DELETED, or MODIFIED to what it was at first."""
        past = [found for _, _, _, found in self._history if found and found["metadata"]["name"] == name]
        if past:
            self._history.append((self._version, kind, PODS, past[0]))
            self._wake()

    def garbage(self) -> None:
        """Send a line that is not JSON."""
        self._history.append((self._version, "", PODS, {}))
        self._wake()

    def close_watches(self) -> None:
        """End all watches as a proxy does."""
        self._close += 1
        self._wake()

    def ready_uids(self) -> set[str]:
        """The pods that should get new requests."""
        return {
            pod["metadata"]["uid"]
            for (resource, _, _), pod in self.objects.items()
            if resource == PODS
            and pod["status"]["conditions"][0]["status"] == "True"
            and "deletionTimestamp" not in pod["metadata"]
        }

    def _put(self, resource: str, found: Object) -> Object:
        meta = found["metadata"]
        key = resource, meta["namespace"], meta["name"]
        kind = "MODIFIED" if key in self.objects else "ADDED"
        self.objects[key] = found
        self._record(kind, resource, found)
        return found

    def _record(self, kind: str, resource: str, found: Object) -> None:
        self._version += 1
        found = deepcopy(found)
        found["metadata"]["resourceVersion"] = str(self._version)
        if kind != "DELETED":
            self.objects[resource, found["metadata"]["namespace"], found["metadata"]["name"]] = found
        if self.faults.drop:
            self.faults.drop -= 1
            return
        self._history.append((self._version, kind, resource, found))
        self._wake()

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    # --- the API ---

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        await asyncio.sleep(0.001)
        if self.faults.down:
            raise ConnectFailed(f"pod {request.url.host}: cannot connect", refused=True)
        verb = "watch" if request.url.params.get("watch") else "list"
        if self.faults.status and self.faults.refused_verb in ("", verb):
            headers = {"retry-after": str(self.faults.retry_after_s)} if self.faults.retry_after_s else {}
            body = {"kind": "Status", "code": self.faults.status, "message": f'User "sa" cannot {verb} resource "pods"'}
            return httpx.Response(self.faults.status, json=body, headers=headers)
        path, query = request.url.path.split("/"), request.url.params
        if "nodes" in path:
            labels = self.nodes.get(path[-1])
            meta = {"metadata": {"name": path[-1], "labels": labels}}
            return httpx.Response(200, json=meta) if labels is not None else httpx.Response(404, json={})
        if OBJECTIVES in path:
            return self._list_objectives(path[2], path[5], query)
        namespace = path[path.index("namespaces") + 1] if "namespaces" in path else "*"
        if POOLS in path:
            return self._one(POOLS, namespace, path[-1])
        if not query.get("watch"):
            return self._list(path[-1], namespace, query)
        version = int(query.get("resourceVersion", self._version))
        if self.faults.forget and version != self._version and not self.faults.forget_in_stream:
            return httpx.Response(410, json={"kind": "Status", "code": 410, "message": "too old"})
        lines = self._watch(path[-1], namespace, version, float(query["timeoutSeconds"]))
        return httpx.Response(200, stream=_Lines(lines))

    def _list_objectives(self, group: str, namespace: str, query: httpx.QueryParams) -> httpx.Response:
        """As for any other kind; one that the cluster lacks is not found."""
        if f"list {OBJECTIVES}" in self.faults.denied:
            message = f'User "sa" cannot list resource "{OBJECTIVES}"'
            return httpx.Response(403, json={"kind": "Status", "code": 403, "message": message})
        if not any(resource == f"{group}/{OBJECTIVES}" for resource, _, _ in self.objects):
            return httpx.Response(404, text="404 page not found")
        return self._list(f"{group}/{OBJECTIVES}", namespace, query)

    def _one(self, resource: str, namespace: str, name: str) -> httpx.Response:
        if f"get {resource}" in self.faults.denied:
            message = f'User "sa" cannot get resource "{resource}"'
            return httpx.Response(403, json={"code": 403, "message": message})
        known = self.objects.get((resource, namespace, name))
        return httpx.Response(404, json={"message": "not found"}) if known is None else httpx.Response(200, json=known)

    def _list(self, resource: str, namespace: str, query: httpx.QueryParams) -> httpx.Response:
        wanted = query.get("resourceVersion", "")
        if wanted and int(wanted) > self._version:
            return httpx.Response(504, json={"code": 504, "message": "Too large resource version"})
        items = [
            one for (kind, ns, _), one in sorted(self.objects.items()) if kind == resource and namespace in (ns, "*")
        ]
        first = int(query.get("continue", 0))
        more = str(first + self.page) if first + self.page < len(items) else ""
        meta = {"resourceVersion": str(self._version), "continue": more}
        return httpx.Response(200, json={"metadata": meta, "items": items[first : first + self.page]})

    async def _watch(self, resource: str, namespace: str, version: int, timeout_s: float) -> AsyncIterator[bytes]:
        loop, waker, close = asyncio.get_running_loop(), asyncio.Event(), self._close
        ends_s, at = (
            loop.time() + timeout_s,
            next((n for n, (found, *_) in enumerate(self._history) if found > version), len(self._history)),
        )
        if self.faults.close_old and version != self._version:
            return
        if self.faults.forget and version != self._version:
            yield _line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            return
        self._wakers.add(waker)
        try:
            while self._close == close:
                while at < len(self._history) and not self.faults.silent:
                    before, (_, kind, changed, found) = self._history[at - 1] if at else None, self._history[at]
                    at += 1
                    if changed == resource and namespace in (found.get("metadata", {}).get("namespace"), "*", None):
                        yield _line(kind, found) if kind else b"<html>bad gateway\n"
                        if self.faults.repeat and before and before[2] == resource and before[1]:
                            yield _line(before[1], before[3])
                waker.clear()
                remaining_s = ends_s - loop.time()
                if self.faults.silent:
                    await asyncio.Event().wait()
                if remaining_s <= 0:
                    return
                try:
                    async with asyncio.timeout(min(remaining_s, BOOKMARK_S)):
                        await waker.wait()
                except TimeoutError:
                    yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})
        finally:
            self._wakers.discard(waker)


class FakeConnections:
    """Connections to the cluster."""

    def __init__(self, cluster: FakeKubernetes, url: str) -> None:
        self._cluster = cluster
        self._url = url

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> FakeResponse:
        request = httpx.Request(method, self._url + target, headers=headers, content=body)
        return FakeResponse(await self._cluster.handle(request))

    def close(self) -> None:
        """Nothing is open."""


class FakeResponse:
    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers.raw
        self._pieces = response.aiter_bytes()

    async def read(self) -> bytes:
        return await anext(self._pieces, b"")

    def close(self) -> None:
        """Nothing is open."""


class _Lines(httpx.AsyncByteStream):
    def __init__(self, lines: AsyncIterator[bytes]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._lines:
            half = len(line) // 2  # pieces of a response do not end with lines
            yield line[:half]
            yield line[half:]


def _line(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"
