"""Prompts that pods have computed."""

from __future__ import annotations

from collections.abc import Sequence

from router.index.predicted import PredictedIndex
from router.types import BlockHash, PodId


def record(
    index: PredictedIndex,
    pod: PodId,
    hashes: Sequence[BlockHash],
    now_s: float,
    *,
    ttl_s: float,
    capacity_blocks: int | None = None,
) -> None:
    """The pod has been sent a prompt, and has computed it."""
    index.confirm(index.begin(pod, hashes, ttl_s=ttl_s, capacity_blocks=capacity_blocks), now_s)
