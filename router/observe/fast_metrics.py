"""Counters and histograms at a tenth of the cost of `prometheus_client`'s, for what is counted on every request.

No locks, because only the event loop counts, and buckets are found by bisection. `prometheus_client` exposes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
_Child = TypeVar("_Child")


class Count:
    """One growing number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount


class UpDownGauge(Count):
    """One number that rises and falls, registered under a name."""

    __slots__ = ("_described",)

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        super().__init__()
        self._described = name, documentation
        registry.register(self)

    def dec(self) -> None:
        """Subtract one."""
        self.value -= 1

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by the registry."""
        yield GaugeMetricFamily(*self._described, value=self.value)


class GaugeTable:
    """Gauge values by labels that are replaced all at once. `Gauge` would make an object for each."""

    def __init__(self, name: str, documentation: str, names: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._described = name, documentation, names
        self._values: Mapping[Labels, float] = {}
        registry.register(self)

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Use these values; earlier ones are gone."""
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by the registry."""
        name, documentation, names = self._described
        family = GaugeMetricFamily(name, documentation, labels=names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Buckets:
    """Counts of values by upper bound (inclusive), and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Children(dict[Labels, _Child]):
    """Children by label values, made on first use."""

    def __init__(self, make: Callable[[], _Child]) -> None:
        self._make = make

    def __missing__(self, values: Labels) -> _Child:
        child = self[values] = self._make()
        return child


class Counter:
    """Counts by the values of the labels `names`."""

    def __init__(self, name: str, documentation: str, names: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._described = name, documentation, names
        self._children = _Children(Count)
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The count of these label values."""
        return self._children[values]

    def remove_where(self, matches: Callable[[Labels], bool]) -> None:
        """Remove the series whose label values match."""
        for values in [values for values in self._children if matches(values)]:
            del self._children[values]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by the registry."""
        name, documentation, names = self._described
        family = CounterMetricFamily(name, documentation, labels=names)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Histogram:
    """Histograms by the values of the labels `names`; `buckets` are ascending upper bounds."""

    def __init__(
        self,
        name: str,
        documentation: str,
        names: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._described = name, documentation, names
        self._bounds = tuple(map(float, buckets))
        self._children = _Children(lambda: Buckets(self._bounds))
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The buckets of these label values."""
        return self._children[values]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry."""
        name, documentation, names = self._described
        family = HistogramMetricFamily(name, documentation, labels=names)
        bounds = [_written(bound) for bound in (*self._bounds, float("inf"))]
        for values, child in self._children.items():
            family.add_metric(values, list(zip(bounds, accumulate(child.counts), strict=True)), child.total)
        yield family


def _written(bound: float) -> str:
    """As `prometheus_client` writes bounds."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
