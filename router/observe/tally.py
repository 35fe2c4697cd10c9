"""How is something counted on every request for next to nothing?

Counters and histograms with the interface of `prometheus_client` as far as it is used here, at a tenth of the cost: no
locks, because only the event loop counts, and a bucket found by bisection. What they have counted is exposed by
`prometheus_client` itself. This file names no metric.
"""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from operator import itemgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

MOST_ROWS = 64
"""Held until they are put into buckets: together, that costs a fifth, and takes 0.1 ms."""

Labels = tuple[str, ...]
_Child = TypeVar("_Child")


class Count:
    """One number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add so much."""
        self.value += amount


class Level(Count):
    """One number that rises and falls, exposed under a name of its own."""

    __slots__ = ("_described",)

    def __init__(self, name: str, about: str, *, registry: CollectorRegistry) -> None:
        super().__init__()
        self._described = name, about
        registry.register(self)

    def dec(self) -> None:
        """One less."""
        self.value -= 1

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For the registry."""
        yield GaugeMetricFamily(*self._described, value=self.value)


class Readings:
    """Numbers by the values of `names` that are taken whole, at once, from somebody who knows: `Gauge` makes an object
    of each, which takes as long as everything else about it."""

    def __init__(self, name: str, about: str, names: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._described = name, about, names
        self._values: Mapping[Labels, float] = {}
        registry.register(self)

    def take(self, values: Mapping[Labels, float]) -> None:
        """These, and none of those before."""
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For the registry."""
        name, about, names = self._described
        family = GaugeMetricFamily(name, about, labels=names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Spread:
    """How many values lay between the bounds, each of which counts as below itself; and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Add them all."""
        values = list(values)
        for at, found in collections.Counter(map(bisect_left, repeat(self.bounds), values)).items():
            self.counts[at] += found
        self.total += sum(values)


class _Children(dict[Labels, _Child]):
    """What is counted by each set of values: there from when it is first asked for."""

    def __init__(self, make: Callable[[], _Child]) -> None:
        self._make = make

    def __missing__(self, values: Labels) -> _Child:
        child = self[values] = self._make()
        return child


class Counter:
    """Counts by the values of `names`; `of` has them without a call."""

    def __init__(self, name: str, about: str, names: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._described = name, about, names
        self.of = _Children(Count)
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The count of these values."""
        return self.of[values]

    def remove(self, *values: str) -> None:
        """These values are not counted any more."""
        self.of.pop(values, None)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        name, about, names = self._described
        family = CounterMetricFamily(name, about, labels=names)
        for values, child in self.of.items():
            family.add_metric(values, child.value)
        yield family


class Histogram:
    """Spreads by the values of `names`, `of` them without a call; `buckets` are upper bounds, rising."""

    def __init__(
        self, name: str, about: str, names: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._described = name, about, names
        self._bounds = tuple(map(float, buckets))
        self.of = _Children(lambda: Spread(self._bounds))
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        """The spread of these values."""
        return self.of[values]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        name, about, names = self._described
        family = HistogramMetricFamily(name, about, labels=names)
        bounds = [_written(bound) for bound in (*self._bounds, float("inf"))]
        for values, child in self.of.items():
            family.add_metric(values, list(zip(bounds, accumulate(child.counts), strict=True)), child.total)
        yield family


class RowHistogram(Histogram):
    """One of the label `name` whose `values` are mostly seen together."""

    def __init__(
        self,
        title: str,
        about: str,
        name: str,
        values: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        super().__init__(title, about, [name], buckets=buckets, registry=registry)
        self._spreads = {value: self.labels(value) for value in values}
        self._rows: list[Mapping[str, float]] = []

    def observe_row(self, row: Mapping[str, float]) -> None:
        """Add what was seen with each value of the label that `row` names."""
        if len(row) < len(self._spreads):
            for name, value in row.items():
                self._spreads[name].observe(value)
            return
        self._rows.append(row)
        if len(self._rows) >= MOST_ROWS:
            self._spread()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        self._spread()
        return super().collect()

    def _spread(self) -> None:
        """Put what is held into buckets."""
        rows, self._rows = self._rows, []
        for name, spread in self._spreads.items():
            spread.observe_all(map(itemgetter(name), rows))


def _written(bound: float) -> str:
    """As `prometheus_client` writes it, so that series go on."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
