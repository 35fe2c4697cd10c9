"""Finds the pods of a Kubernetes cluster by label selector.

Each namespace is followed by a task of its own. While the API server is away the last pods stay in use. Zone and rack
are read from the labels of nodes, where permissions allow it.

A pod is used from its first readiness on. While it is not ready it is drained, for a grace period: readiness often
fails because the engine is busy, and its streams and cached blocks are still there. A terminating pod is drained until
it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import quote

import msgspec
import structlog

from router.config.pod_schema import KubernetesPods, PodConfig
from router.errors import ConfigError
from router.feeds.discovery.kube_api import KubeApi, KubeApiError, KubePod, pod_reader, read_labels
from router.feeds.discovery.kube_watch import KubeWatch
from router.feeds.discovery.membership import ListedPod, SourceStatus
from router.feeds.discovery.pod_facts import ZONE_LABEL, NodePlace, pod_configs, read_keys, unknown_annotations
from router.feeds.supervise import STEP, cancel_all, loop_time_s, supervise
from router.fleet.fleet import NOT_READY

TERMINATING = "terminating in Kubernetes"


SeenPod: TypeAlias = tuple[PodConfig, KubePod]
"""A pod at one port, as the cluster reports it."""
RETRY_S = 30.0
MAX_NODES = 10_000
_DENIED = (401, 403)

log = structlog.get_logger()


class Presence:
    """The pods that are used, and since when they are not ready."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._not_ready_since_s: dict[tuple[str, str], float | None] = {}
        """When each pod in use became unready, by uid and URL; None while it is ready."""
        self.next_change_s: float | None = None
        """When the result changes by time alone."""

    def update(self, seen: Iterable[SeenPod], now_s: float) -> list[ListedPod]:
        """The pods that are used now. Of two with one URL the last is the one that listens there: a pod keeps its
        address in the API for a while after another has got it."""
        before, self._not_ready_since_s = self._not_ready_since_s, {}
        changes_s, listed = list[float](), list[ListedPod]()
        for config, pod in sorted(seen, key=lambda each: (not each[1].terminating, each[1].ready, each[1].created)):
            key = pod.uid, config.url
            reason = TERMINATING if pod.terminating else "" if pod.ready else NOT_READY
            if key not in before and reason:
                continue
            since_s = None if reason != NOT_READY else before[key] if before[key] is not None else now_s
            if since_s is not None:
                if now_s >= since_s + self._grace_s:
                    continue
                changes_s.append(since_s + self._grace_s)
            self._not_ready_since_s[key] = since_s
            listed.append(ListedPod(config, pod.uid, reason))
        self.next_change_s = min(changes_s, default=None)
        return listed


UNKNOWN = NodePlace()


class NodePlaces:
    """The places of the nodes that were asked for. `on_change` is called when one becomes known."""

    def __init__(self, api: KubeApi, entry: KubernetesPods, on_change: Callable[[], None]) -> None:
        self._api = api
        self._entry = entry
        self._on_change = on_change
        self._places: dict[str, NodePlace] = {}
        self._wanted: dict[str, None] = {}
        self._asked = asyncio.Event()

    def place(self, node: str) -> NodePlace:
        """Where a node is; unknown until it has been read."""
        known = self._places.get(node)
        if known is None and node and self._entry.node_labels and len(self._wanted) < MAX_NODES:
            self._wanted[node] = None
            self._asked.set()
        return known or UNKNOWN

    async def run(self) -> None:
        """Read the nodes that are asked for until cancelled, or until permission is denied."""
        while self._entry.node_labels:
            await self._asked.wait()
            self._asked.clear()
            for node in list(self._wanted):
                try:
                    await self._read(node)
                except KubeApiError as error:
                    if error.status in _DENIED:
                        self._explain(error)
                        return
                    if error.status == 404:
                        self._wanted.pop(node, None)
                        continue
                    self._asked.set()
                    await asyncio.sleep(RETRY_S)
                    break

    async def _read(self, node: str) -> None:
        try:
            labels = read_labels(await self._api.get(f"/api/v1/nodes/{quote(node, safe='')}", {}))
        except (msgspec.DecodeError, UnicodeDecodeError):
            labels = {}
        self._places[node] = NodePlace(labels.get(ZONE_LABEL, ""), labels.get(self._entry.rack_label, ""))
        self._wanted.pop(node, None)
        self._on_change()

    def _explain(self, error: KubeApiError) -> None:
        log.info(
            "zones of nodes unknown",
            error=str(error),
            hint='a ClusterRole with resources: ["nodes"], verbs: ["get"] lets the router read them; '
            "node_labels: false ends this message",
        )


@dataclass(slots=True, eq=False)
class PodReader:
    """Maps pods to what the router uses. Builds the definitions of a pod only when it or its node has changed."""

    entry: KubernetesPods
    nodes: NodePlaces
    ports: Sequence[int]
    many_namespaces: bool
    _built: dict[str, tuple[KubePod, NodePlace, list[PodConfig]]] = field(default_factory=dict)

    async def seen(self, pods: Iterable[KubePod]) -> list[SeenPod]:
        before, self._built = self._built, {}
        found: list[SeenPod] = []
        changed = 0
        for pod in pods:
            if pod.finished or not pod.address:
                continue
            place = self.nodes.place(pod.node)
            known = before.get(pod.uid)
            if known is None or known[:2] != (pod, place):
                known = pod, place, self._configs(pod, place, known)
                changed += 1
                if changed % STEP == 0:
                    await asyncio.sleep(0)
            self._built[pod.uid] = known
            found += ((config, pod) for config in known[2])
        return found

    def _configs(
        self, pod: KubePod, place: NodePlace, known: tuple[KubePod, NodePlace, list[PodConfig]] | None
    ) -> list[PodConfig]:
        namespace, name = pod.key
        pod_id = f"{namespace}/{name}" if self.many_namespaces else name
        is_new = known is None or known[0].labels != pod.labels
        if is_new and (unknown := unknown_annotations(pod)):
            log.warning("unknown annotations of a pod", pod=pod_id, annotations=unknown)
        try:
            return pod_configs(pod, self.entry, place, pod_id, self.ports)
        except ConfigError as error:
            if is_new:
                log.error("annotations of a pod are wrong; the pod is not used", pod=pod_id, error=str(error))
            return []


class KubernetesSource:
    """The pods of one entry of `discovery.kubernetes`. `statuses`: by namespace; `ports`: of an InferencePool."""

    def __init__(
        self, entry: KubernetesPods, api: KubeApi, statuses: dict[str, SourceStatus], ports: Sequence[int] = ()
    ) -> None:
        self._api = api
        self._changed = asyncio.Event()
        self._nodes = NodePlaces(api, entry, self._changed.set)
        many = len(statuses) > 1 or "*" in statuses
        self._presence = Presence(entry.not_ready_grace_s)
        self._reader = PodReader(entry, self._nodes, ports, many_namespaces=many)
        read = pod_reader(read_keys(entry))
        self._watches = [
            KubeWatch(api, entry, namespace, read, status, self._changed.set) for namespace, status in statuses.items()
        ]

    async def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        runs = {f"watch {number}": watch.run for number, watch in enumerate(self._watches)} | {"nodes": self._nodes.run}
        tasks = [asyncio.create_task(supervise(name, run)) for name, run in runs.items()]
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._presence.next_change_s):
                        await self._changed.wait()
                self._changed.clear()
                if any(watch.listed for watch in self._watches):
                    seen = await self._reader.seen(self._pods())
                    yield self._presence.update(seen, loop_time_s())
        finally:
            await cancel_all(tasks)
            self._api.close()

    def _pods(self) -> list[KubePod]:
        return [pod for watch in self._watches for pod in watch.table.pods.values()]
