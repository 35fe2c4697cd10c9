"""On which hardware?"""

from __future__ import annotations

from router.policy.match import Names
from router.policy.term import Filter
from router.types import PodStatus


class Hardware(Filter):
    """Keeps the pods whose hardware is one of `only`."""

    only: Names
    """As `config/models` and `hardware:` of router.yaml name it, such as h100x2."""

    def keeps(self, status: PodStatus) -> bool:
        return status.pod.hardware in self.only
