"""At which engines do requests pile up?"""

from __future__ import annotations

from pydantic import NonNegativeInt

from router.policy.term import Filter
from router.types import PodStatus


class MaxWaiting(Filter):
    """Keeps the pods that last said waiting <= requests."""

    requests: NonNegativeInt = 8
    """That wait in the engine's own queue, whoever sent them."""

    def keeps(self, status: PodStatus) -> bool:
        return status.load.waiting <= self.requests
