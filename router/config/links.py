"""Reads `config/hardware/links.yaml`: classes of links that KV moves over, with their expected speed.

The section `links` of router.yaml names these classes. Calibration replaces the numbers at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pydantic import NonNegativeFloat, PositiveFloat

from router.config.load import Strict, load, shipped
from router.config.mistakes import nearest
from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.errors import ConfigError
from router.types import Link, Links


class LinkFigures(Strict):
    """`transfer ms = t0 + bytes / bandwidth` of a transfer that has the link to itself."""

    t0_ms: NonNegativeFloat
    gb_per_s: PositiveFloat

    def link(self, kind: str) -> Link:
        """The figures as a core value. Calibration applies to all links of one `kind`."""
        return Link(self.t0_ms, self.gb_per_s * BYTES_PER_MS_PER_GB_PER_S, kind)


class LinkClass(LinkFigures):
    """A class of links and the source of its figures."""

    source: str


class LinkClasses(Strict):
    """`config/hardware/links.yaml`."""

    classes: dict[str, LinkClass]


WhichLink: TypeAlias = str | LinkFigures | None
"""The name of a class, or figures; None: no such link."""


class LinksConfig(Strict):
    """The links of this fleet. Two pods use the link of the nearest place that they share."""

    same_host: WhichLink = None
    same_rack: WhichLink = None
    same_zone: WhichLink = None
    elsewhere: WhichLink = None
    """Between all other pods. Without it, they exchange no KV."""
    cpu: WhichLink = "pcie4"
    """From a pod's memory to its GPU."""
    disk: WhichLink = "nvme"
    remote: WhichLink = "rdma_100"
    """From a store to a GPU."""


def load_link_classes() -> dict[str, LinkClass]:
    return load(shipped("config") / "hardware" / "links.yaml", LinkClasses).classes


def build_links(config: LinksConfig, classes: Mapping[str, LinkClass]) -> Links:
    """A link with its own figures is calibrated under the name of its place. Raises `ConfigError`."""
    return Links(**{place: _link(place, getattr(config, place), classes) for place in LinksConfig.model_fields})


def _link(place: str, which: WhichLink, classes: Mapping[str, LinkClass]) -> Link | None:
    if which is None:
        return None
    if isinstance(which, LinkFigures):
        return which.link(place)
    if which not in classes:
        known = ", ".join(sorted(classes))
        raise ConfigError(f"links.{place}: unknown link class {which!r}{nearest(which, classes)}; known: {known}")
    return classes[which].link(which)
