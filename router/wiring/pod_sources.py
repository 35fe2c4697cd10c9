"""Builds the discovery sources that a configuration names, for `warmroute serve` and `warmroute publish`."""

from __future__ import annotations

from router.config.pod_schema import KubernetesPods
from router.config.schema import Limits, RouterConfig
from router.feeds.discovery.inference_pool import PoolObjectives, PoolPods, PoolTarget
from router.feeds.discovery.kube_api import CONNECT_TIMEOUT_S, QUIET_S, REQUEST_TIMEOUT_S, KubeApi, own_namespace
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.membership import ConfiguredPods, PodSource, SourceStatus
from router.feeds.discovery.target_file import FilePods
from router.feeds.supervise import Feeds
from router.frontends.http.upstream import UpstreamPool
from router.types import PodTls


def api_server(url: str, tls: PodTls) -> UpstreamPool:
    limits = Limits(connect_timeout_s=CONNECT_TIMEOUT_S, first_byte_timeout_s=REQUEST_TIMEOUT_S, idle_timeout_s=QUIET_S)
    return UpstreamPool(url, url, limits, tls=tls)


class PodSources:
    """The sources by name. Of two pods with one URL the one of the later source wins. Raises `ConfigError`."""

    def __init__(self, config: RouterConfig) -> None:
        self.by_name: dict[str, PodSource] = {"configuration": ConfiguredPods(config.pods)}
        self.statuses: list[SourceStatus] = []
        """The states of the sources whose pods may be outdated."""
        self._objectives: list[PoolObjectives] = []
        found = config.discovery
        for file in found.file:
            status = self._status(f"file {file.path}")
            self.by_name[status.source] = FilePods(file, status)
        for name in found.dns:
            from router.feeds.discovery.dns_pods import DnsPods, resolve  # imports dnspython

            status = self._status(f"dns {name.name}")
            self.by_name[status.source] = DnsPods(name, status, resolve)
        for entry in found.kubernetes:
            (self._add_pool if entry.inference_pool else self._add_cluster)(entry)

    def _add_pool(self, entry: KubernetesPods) -> None:
        namespace, api = (entry.namespaces or (own_namespace(),))[0], KubeApi(entry.api, api_server)
        status = self._status(f"InferencePool {entry.inference_pool} in {namespace}")
        pods = {namespace: self._status(f"kubernetes, of InferencePool {entry.inference_pool} in {namespace}")}

        def follow(target: PoolTarget) -> KubernetesSource:
            selecting = entry.model_copy(update={"selector": target.selector})
            return KubernetesSource(selecting, api, pods, target.ports)

        self.by_name[status.source] = PoolPods(entry.inference_pool, namespace, api, status, follow)
        objectives = SourceStatus(f"InferenceObjectives of {entry.inference_pool} in {namespace}")
        self._objectives.append(PoolObjectives(entry.inference_pool, namespace, api, objectives))

    def _add_cluster(self, entry: KubernetesPods) -> None:
        name = f"kubernetes {entry.selector}"
        namespaces = entry.namespaces or (own_namespace(),)
        statuses = {namespace: self._status(f"{name} in {namespace}") for namespace in namespaces}
        source = KubernetesSource(entry, KubeApi(entry.api, api_server), statuses)
        self.by_name[statuses[namespaces[0]].source] = source

    def objectives(self) -> Feeds:
        """The tasks that read the priorities of requests, where a queue has a use for them."""
        self.statuses += [one.status for one in self._objectives]
        return {one.status.source: one.run for one in self._objectives}

    def priority(self, objective: bytes) -> int:
        """The priority of requests with this objective; 0 if no pool has it."""
        return next((one.priorities[objective] for one in self._objectives if objective in one.priorities), 0)

    def _status(self, name: str) -> SourceStatus:
        number = sum(status.source.split(" #")[0] == name for status in self.statuses)
        status = SourceStatus(f"{name} #{number + 1}" if number else name)
        self.statuses.append(status)
        return status
