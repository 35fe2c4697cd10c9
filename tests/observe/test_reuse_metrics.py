"""Intervals between uses of a prefix."""

from __future__ import annotations

import pytest

from router.observe import class_metrics
from router.observe.class_metrics import ReuseMetrics
from router.observe.fast_metrics import Registry


def intervals(registry: Registry) -> tuple[float, float]:
    """Their number and sum."""
    name, labels = "warmroute_prefix_reuse_interval_seconds", {"model": "m"}
    count, total = (registry.get_sample_value(f"{name}_{end}", labels) for end in ("count", "sum"))
    return count or 0.0, total or 0.0


def test_the_interval_between_two_uses_of_a_prefix() -> None:
    """The first use of each has none, nor has a prompt without blocks."""
    registry = Registry()
    metrics = ReuseMetrics(registry)
    for now_s in (10.0, 40.0, 45.0):
        metrics.add("m", 7, now_s)
        metrics.add("m", int(1000 * now_s), now_s)
        metrics.add("m", 0, now_s)
    assert intervals(registry) == (2, 35.0)


def test_only_the_latest_prefixes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that repeats nothing does not fill the memory."""
    monkeypatch.setattr(class_metrics, "MAX_PREFIXES", 3)
    registry = Registry()
    metrics = ReuseMetrics(registry)
    for number in (1, 2, 3, 4, 1, 4):
        metrics.add("m", number, float(number))
    assert len(metrics._used_s) == 3
    assert intervals(registry) == (1, 0.0)
