"""Builds the discovery sources that a configuration names, for `warmroute serve` and `warmroute publish`."""

from __future__ import annotations

from router.config.schema import RouterConfig
from router.errors import ConfigError
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
        if found.dns or found.kubernetes:
            raise ConfigError("discovery: dns and kubernetes are not built yet")

    def _status(self, name: str) -> SourceStatus:
        number = sum(status.source.split(" #")[0] == name for status in self.statuses)
        status = SourceStatus(f"{name} #{number + 1}" if number else name)
        self.statuses.append(status)
        return status
