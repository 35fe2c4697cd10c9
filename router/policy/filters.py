"""The filters that a policy file can name."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from functools import lru_cache
from typing import Annotated

from pydantic import Field, NonNegativeInt, model_validator

from router.policy.match import Names
from router.policy.term import Filter
from router.types import PodStatus


class PodsFilter(Filter):
    """Keeps the pods whose id matches a pattern of `only` and none of `without`. In a pattern `*` is any text, `?` any
    character and `[ab]` one of these."""

    only: Names | None = None
    """Patterns of which one must match; null for any pod."""
    without: Names | None = None
    """Patterns of which none may match."""

    @model_validator(mode="after")
    def _has_patterns(self) -> PodsFilter:
        if self.only is None and self.without is None:
            raise ValueError("needs `only` or `without`")
        return self

    def keeps(self, status: PodStatus) -> bool:
        pod = status.pod.id
        return (self.only is None or bool(_like(self.only)(pod))) and not (self.without and _like(self.without)(pod))


@lru_cache(maxsize=256)
def _like(patterns: Names) -> Callable[[str], object]:
    """Truthy for a name that matches one of the patterns. Compiled once, since it is called for every pod of every
    request."""
    return re.compile("|".join(map(translate, patterns))).match


class HardwareFilter(Filter):
    """Keeps the pods whose hardware is one of `only`."""

    only: Names
    """Names as in `config/models` and `hardware:` of router.yaml, for example h100x2."""

    def keeps(self, status: PodStatus) -> bool:
        return status.pod.hardware in self.only


class TopologyFilter(Filter):
    """Keeps the pods in one of these zones, racks and hosts. With `match: {headers: {x-zone: eu-1}}` a client's
    requests stay in its own zone."""

    zone: Names | None = None
    """Values of `zone` of the pods in router.yaml; null for any."""
    rack: Names | None = None
    """The same for `rack`."""
    host: Names | None = None
    """The same for `host`."""

    @model_validator(mode="after")
    def _has_places(self) -> TopologyFilter:
        if self.zone is None and self.rack is None and self.host is None:
            raise ValueError("needs a zone, a rack or a host")
        return self

    def keeps(self, status: PodStatus) -> bool:
        pod = status.pod
        return (
            (self.zone is None or pod.zone in self.zone)
            and (self.rack is None or pod.rack in self.rack)
            and (self.host is None or pod.host in self.host)
        )


class MaxKvUsageFilter(Filter):
    """Keeps the pods with a KV usage of at most `share` in the last scrape. A fuller engine preempts: it stops running
    requests and computes them again later."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Used share of the KV cache, 0 to 1."""

    def keeps(self, status: PodStatus) -> bool:
        return status.load.kv_usage <= self.share


class MaxWaitingFilter(Filter):
    """Keeps the pods with at most `requests` waiting requests in the last scrape."""

    requests: NonNegativeInt = 8
    """Requests of any origin in the engine's own queue."""

    def keeps(self, status: PodStatus) -> bool:
        return status.load.waiting <= self.requests
