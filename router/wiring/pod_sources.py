"""Selects the discovery sources that a configuration names, for `warmroute serve` and `warmroute publish`."""

from __future__ import annotations

from router.config.schema import RouterConfig
from router.feeds.discovery.membership import ConfiguredPods, PodSource


def pod_sources(config: RouterConfig) -> dict[str, PodSource]:
    """The sources by name. Of two pods with one URL the one of the later source wins."""
    return {"configuration": ConfiguredPods(config.pods)}
