"""Where do the pods stand?"""

from __future__ import annotations

from pydantic import model_validator

from router.policy.match import Names
from router.policy.term import Filter
from router.types import PodStatus


class Topology(Filter):
    """Keeps the pods that stand in one of these zones, racks and hosts; what is not given does not count. With
    `match: {headers: {x-zone: eu-1}}` it keeps a client's requests in its own zone."""

    zone: Names | None = None
    """As the pods' own `zone` in router.yaml."""
    rack: Names | None = None
    """The same for `rack`."""
    host: Names | None = None
    """The same for `host`."""

    @model_validator(mode="after")
    def _says_something(self) -> Topology:
        if self.zone is None and self.rack is None and self.host is None:
            raise ValueError("name a zone, a rack or a host")
        return self

    def keeps(self, status: PodStatus) -> bool:
        pod = status.pod
        return (
            (self.zone is None or pod.zone in self.zone)
            and (self.rack is None or pod.rack in self.rack)
            and (self.host is None or pod.host in self.host)
        )
