"""Which sources of pods a configuration builds, and what they write."""

from __future__ import annotations

from typing import Any

import pytest

from router.config.schema import RouterConfig
from router.wiring.pod_sources import PodSources


def entry(**keys: Any) -> dict[str, Any]:
    return {"selector": "app=vllm", "namespaces": ["ns"], "api": {"url": "http://kube"}, **keys}


async def no_costs() -> None:
    return None


@pytest.mark.parametrize(
    ("entries", "writers"),
    [
        ([entry()], 0),
        ([entry(deletion_cost=True)], 1),
        ([entry(deletion_cost=True), entry(), entry(deletion_cost=True)], 2),
    ],
)
def test_deletion_costs_are_written_for_the_entries_that_ask_for_it(
    entries: list[dict[str, Any]], writers: int
) -> None:
    sources = PodSources(RouterConfig.model_validate({"models": [], "discovery": {"kubernetes": entries}}))
    assert len(sources.deletion_costs(no_costs)) == writers
