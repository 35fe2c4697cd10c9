"""Builds the discovery sources that a configuration names, for `warmroute serve` and `warmroute publish`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.config.schema import RouterConfig
from router.feeds.discovery.membership import ConfiguredPods, PodSource, SourceStatus

if TYPE_CHECKING:
    from router.feeds.discovery.inference_pool import PoolObjectives


@dataclass(frozen=True, slots=True)
class PodSources:
    """The sources by name, and the states of those whose pods may be outdated. Of two pods with one URL the one of the
    later source wins."""

    by_name: Mapping[str, PodSource]
    statuses: Sequence[SourceStatus]
    objectives: Sequence[PoolObjectives]

    def priority(self, objective: bytes) -> int:
        """The priority of requests with this objective; 0 if no pool has it."""
        return next((one.priorities[objective] for one in self.objectives if objective in one.priorities), 0)


def pod_sources(config: RouterConfig) -> PodSources:
    """Raises `ConfigError`."""
    by_name: dict[str, PodSource] = {"configuration": ConfiguredPods(config.pods)}
    statuses, objectives, found = list[SourceStatus](), list["PoolObjectives"](), config.discovery

    def status(name: str) -> SourceStatus:
        number = sum(one.source.split(" #")[0] == name for one in statuses)
        statuses.append(SourceStatus(f"{name} #{number + 1}" if number else name))
        return statuses[-1]

    for file in found.file:
        from router.feeds.discovery.target_file import FilePods

        own = status(f"file {file.path}")
        by_name[own.source] = FilePods(file, own)
    for name in found.dns:
        from router.feeds.discovery.dns_pods import DnsPods, resolve  # imports dnspython

        own = status(f"dns {name.name}")
        by_name[own.source] = DnsPods(name, own, resolve)
    for entry in found.kubernetes:
        from router.wiring.kube_sources import pool_pods, selected_pods

        if entry.inference_pool:
            source, by_name[source], priorities = pool_pods(entry, status)
            objectives.append(priorities)
        else:
            source, by_name[source] = selected_pods(entry, status)
    return PodSources(by_name, statuses, objectives)
