"""Which ways can KV take, and how fast are they, before we have measured them?

Reads `config/hardware/links.yaml`, whose classes the section `links:` of router.yaml names. What transfers really took
replaces these numbers; this file never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from pydantic import NonNegativeFloat, PositiveFloat

from router.config.load import Strict, load
from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.errors import ConfigError
from router.types import Link, Links


class LinkFigures(Strict):
    """`transfer ms = t0 + bytes / bandwidth`, as of one transfer that has the link for itself."""

    t0_ms: NonNegativeFloat
    gb_per_s: PositiveFloat

    def link(self, kind: str) -> Link:
        """As the core's value. What is learnt of one link holds for all of its `kind`."""
        return Link(self.t0_ms, self.gb_per_s * BYTES_PER_MS_PER_GB_PER_S, kind)


class LinkClass(LinkFigures):
    """A class of links, and where its figures come from."""

    source: str


class LinkClasses(Strict):
    """`config/hardware/links.yaml`."""

    classes: dict[str, LinkClass]


WhichLink: TypeAlias = str | LinkFigures | None
"""A class's name, or figures of its own; None: no such way."""


class LinksConfig(Strict):
    """The ways that KV can take. Between pods the nearest class counts that both are known to share."""

    same_host: WhichLink = None
    same_rack: WhichLink = None
    same_zone: WhichLink = None
    elsewhere: WhichLink = None
    """Between any other two pods. Without it, they neither pull nor hand over."""
    cpu: WhichLink = "pcie4"
    """From a pod's own memory into its GPU ..."""
    disk: WhichLink = "nvme"
    remote: WhichLink = "rdma_100"
    """... and from a store."""


def load_link_classes(path: Path) -> dict[str, LinkClass]:
    """All classes by name. Raises `ConfigError`."""
    return load(path, LinkClasses).classes


def build_links(config: LinksConfig, classes: Mapping[str, LinkClass]) -> Links:
    """As the core's value; a link with figures of its own is learnt under the name of its place. Raises `ConfigError`
    for a class that is not there."""
    return Links(**{place: _link(place, getattr(config, place), classes) for place in LinksConfig.model_fields})


def _link(place: str, which: WhichLink, classes: Mapping[str, LinkClass]) -> Link | None:
    if which is None:
        return None
    if isinstance(which, LinkFigures):
        return which.link(place)
    if which not in classes:
        raise ConfigError(f"links.{place}: there is no class {which!r}; known: {', '.join(sorted(classes))}")
    return classes[which].link(which)
