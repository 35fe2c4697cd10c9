"""Counters, gauges and histograms at a tenth of the cost of `prometheus_client`'s, which exposes them.

No locks, because only the event loop counts, and buckets are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import accumulate
from time import time
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from router.observe.declared.declaration import Declaration, MetricKind

Labels = tuple[str, ...]
Numbers = list[float]
"""The value of a series, or the counts of its buckets and the sum of its values."""

MAX_SERIES = 10_000
"""Most label values of one metric; the rest is counted in a series whose label values are all `OTHER`."""
OTHER = "other"


class MetricSeries(Protocol):
    def numbers(self) -> Numbers:
        """Its numbers now."""


_Child = TypeVar("_Child", bound=MetricSeries)
_LabelsT = TypeVar("_LabelsT", bound=Labels)


class Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = float(value)

    def numbers(self) -> Numbers:
        return [self.value]


class Buckets:
    """Counts of values by upper bound (inclusive), and their sum. `exemplars`: the latest by bucket number."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] | None = None

    def observe(self, value: float, trace_id: str = "") -> None:
        """Add a value. `trace_id`: the trace of its request, if it is recorded."""
        at = bisect_left(self.bounds, value)
        self.counts[at] += 1
        self.total += value
        if trace_id:
            self.exemplars = {**(self.exemplars or {}), at: Exemplar({"trace_id": trace_id}, value, round(time(), 3))}

    def numbers(self) -> Numbers:
        return [*self.counts, self.total]


class _Children(dict[Labels, _Child]):
    def __init__(self, make: Callable[[], _Child]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, values: Labels) -> _Child:
        if len(self) >= MAX_SERIES:
            values = (OTHER,) * len(values)
            if values in self:
                return self[values]
        child = self[values] = self._make()
        return child


class Labelled(Collector, Generic[_Child]):
    """A metric as declared; without labels one series, 0 at first."""

    def __init__(self, registry: CollectorRegistry, declared: Declaration, make: Callable[[], _Child]) -> None:
        self.declared = declared
        self._children = _Children(make)
        if not declared.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _Child:
        return self._children[values]

    def items(self) -> Iterable[tuple[Labels, _Child]]:
        return self._children.items()

    def remove_where(self, matches: Callable[[Labels], bool]) -> None:
        for values in [values for values in self._children if matches(values)]:
            del self._children[values]

    def series(self) -> dict[Labels, Numbers]:
        return {labels: child.numbers() for labels, child in self._children.items()}

    def family(self, series: Iterable[tuple[Labels, Numbers]]) -> Metric:
        """These series as `prometheus_client` exposes them."""
        raise NotImplementedError

    def collect(self) -> Iterator[Metric]:
        yield self.family(self.series().items())


class _Numbers(Labelled[Count]):
    _family: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def __init__(self, registry: CollectorRegistry, declared: Declaration) -> None:
        super().__init__(registry, declared, Count)

    def set(self, value: float) -> None:
        self.labels().set(value)

    def replace(self, values: Mapping[_LabelsT, float]) -> None:
        """Use these numbers, also above `MAX_SERIES`; earlier ones are gone."""
        self._children.clear()
        for labels, value in values.items():
            child = self._children[labels] = Count()
            child.set(value)

    def family(self, series: Iterable[tuple[Labels, Numbers]]) -> Metric:
        family = self._family(self.declared.name, self.declared.help, labels=self.declared.labels)
        for labels, (value,) in series:
            family.add_metric(labels, value)
        return family


class Counter(_Numbers):
    """Growing numbers by label values. `set` and `replace` are for numbers that another object counts."""

    _family = CounterMetricFamily


class CountsByLast(dict[Labels, tuple[Count, ...]]):
    """The series of a counter by all labels but the last: one for each of `values` of that. One lookup for all."""

    def __init__(self, counter: Counter, values: Iterable[str]) -> None:
        super().__init__()
        self._counter, self._values = counter, tuple(values)

    def __missing__(self, labels: Labels) -> tuple[Count, ...]:
        if len(self) >= MAX_SERIES:
            self.clear()
        found = self[labels] = tuple([self._counter.labels(*labels, value) for value in self._values])
        return found

    def remove_where(self, matches: Callable[[Labels], bool]) -> None:
        self._counter.remove_where(matches)
        self.clear()


class Gauge(_Numbers):
    _family = GaugeMetricFamily

    def replace_states(self, current: Mapping[_LabelsT, StrEnum], states: Iterable[StrEnum]) -> None:
        """`replace` with one series for each of `states`, the last label: 1 for the current one, else 0."""
        self.replace(
            {(*labels, state.value): state is now for labels, now in current.items() for state in tuple(states)}
        )


class Histogram(Labelled[Buckets]):
    def __init__(self, registry: CollectorRegistry, declared: Declaration) -> None:
        super().__init__(registry, declared, partial(Buckets, declared.buckets))
        self._bounds = [str(floatToGoString(bound)) for bound in (*declared.buckets, float("inf"))]  # type: ignore[no-untyped-call]

    def family(self, series: Iterable[tuple[Labels, Numbers]]) -> Metric:
        family = HistogramMetricFamily(self.declared.name, self.declared.help, labels=self.declared.labels)
        for labels, (*counts, total) in series:
            buckets: list[Any] = list(zip(self._bounds, accumulate(counts), strict=True))
            child = self._children.get(labels)
            for at, exemplar in (child.exemplars or {}).items() if child else ():
                buckets[at] = (*buckets[at], exemplar)
            family.add_metric(labels, buckets, total)
        return family


METRICS: Mapping[MetricKind, Callable[[CollectorRegistry, Declaration], Labelled[Any]]] = {
    MetricKind.COUNTER: Counter,
    MetricKind.GAUGE: Gauge,
    MetricKind.HISTOGRAM: Histogram,
}
