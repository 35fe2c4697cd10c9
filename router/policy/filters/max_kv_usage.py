"""Whose KV cache is full?"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.policy.term import Filter
from router.types import PodStatus


class MaxKvUsage(Filter):
    """Keeps the pods that last said kv_usage <= share. Beyond it an engine preempts: it throws running requests out and
    computes them again."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Of its KV cache, 0 to 1."""

    def keeps(self, status: PodStatus) -> bool:
        return status.load.kv_usage <= self.share
