"""Builds the discovery sources that a configuration names, for `warmroute serve` and `warmroute publish`."""

from __future__ import annotations

from router.config.discovery_schema import KubernetesPods
from router.config.schema import RouterConfig
from router.feeds.discovery.dns_pods import DnsPods
from router.feeds.discovery.membership import ConfiguredPods, PodSource
from router.feeds.discovery.source_status import SourceStatus
from router.feeds.discovery.target_file import FilePods


class PodSources:
    """The sources of a configuration by name. Of two pods with one URL the one of the later source wins. Raises
    `ConfigError`."""

    def __init__(self, config: RouterConfig) -> None:
        self.by_name: dict[str, PodSource] = {"configuration": ConfiguredPods(config.pods)}
        self.statuses: list[SourceStatus] = []
        """Of the sources whose pods may be outdated."""
        found = config.discovery
        for file in found.file:
            status = self._status(f"file {file.path}")
            self.by_name[status.source] = FilePods(file, status)
        for name in found.dns:
            from router.feeds.discovery.dns_records import resolve  # imports dnspython

            status = self._status(f"dns {name.name}")
            self.by_name[status.source] = DnsPods(name, status, resolve)
        for entry in found.kubernetes:
            self._add_cluster(entry)

    def _add_cluster(self, entry: KubernetesPods) -> None:
        from router.feeds.discovery.kube_api import KubeApi, own_namespace  # imports httpx
        from router.feeds.discovery.kubernetes_pods import KubernetesSource
        from router.feeds.http_client import open_client

        name = f"kubernetes {entry.selector or entry.service}"
        namespaces = entry.namespaces or (own_namespace(),)
        statuses = {namespace: self._status(f"{name} in {namespace}") for namespace in namespaces}
        source = KubernetesSource(entry, KubeApi(entry.api, open_client()), statuses)
        self.by_name[statuses[namespaces[0]].source] = source

    def _status(self, name: str) -> SourceStatus:
        number = sum(status.source.split(" #")[0] == name for status in self.statuses)
        status = SourceStatus(f"{name} #{number + 1}" if number else name)
        self.statuses.append(status)
        return status
