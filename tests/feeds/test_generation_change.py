"""What a pod reports otherwise than before is a change."""

from __future__ import annotations

from msgspec import structs

from router.engines.adapter import PodFacts
from router.feeds.pod_log import generation_change
from tests.kit.scenes import make_pod


def test_a_pod_that_serves_something_else_is_a_change_of_its_generation() -> None:
    """With what it reported before; its first description is no change, nor is an equal one."""
    served = make_pod("a", models=("m",), version="0.24.1", weights="w", block_size_tokens=16)
    same = PodFacts(models=("m",), version="0.24.1", weights="w", block_size_tokens=16)
    assert generation_change(make_pod("a"), same) == generation_change(served, same) == ""
    newer = structs.replace(same, version="0.25.0", weights="w2", adapters=("one",))
    assert generation_change(served, newer) == "weights w2, before w; version 0.25.0, before 0.24.1"
