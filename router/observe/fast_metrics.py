"""Counters, gauges and histograms at a tenth of the cost of `prometheus_client`'s, which exposes them, and their sums
over several workers.

No locks, because only the event loop counts, and buckets are found by bisection. In a merge, counters, histograms and
the gauges of each worker's own state are added up. Gauges that are equal in all workers are taken from the worker that
is scraped. `process_*` has a series for each worker.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import accumulate
from typing import ClassVar, Generic, TypeAlias, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]

MAX_SERIES = 10_000
"""Most label values of one metric; the rest is counted in a series whose label values are all `OTHER`."""
OTHER = "other"

_Child = TypeVar("_Child")


class Count:
    """One number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = float(value)


class Buckets:
    """Counts of values by upper bound (inclusive), and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Children(dict[Labels, _Child]):
    """Children by label values, made on first use."""

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


class _Labelled(Generic[_Child]):
    """A metric; without labels one series, 0 at first. `labels` are names separated by spaces. Their values are names
    of the router, its configuration, its policies, its pods and their models; of what clients send, only the busiest
    tenants."""

    def __init__(
        self, registry: CollectorRegistry, name: str, documentation: str, labels: str, make: Callable[[], _Child]
    ) -> None:
        self._described = name, documentation
        self._labels = labels.split()
        self._children = _Children(make)
        if not self._labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _Child:
        return self._children[values]

    def items(self) -> Iterable[tuple[Labels, _Child]]:
        """The series by label values."""
        return self._children.items()

    def remove_where(self, matches: Callable[[Labels], bool]) -> None:
        """Remove the series whose label values match."""
        for values in [values for values in self._children if matches(values)]:
            del self._children[values]

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        raise NotImplementedError


class _Numbers(_Labelled[Count]):
    _family: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, labels: str = "") -> None:
        super().__init__(registry, name, documentation, labels, Count)

    def set(self, value: float) -> None:
        """Set a metric without labels."""
        self.labels().set(value)

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Use these numbers, also above `MAX_SERIES`; earlier ones are gone."""
        self._children.clear()
        for labels, value in values.items():
            child = self._children[labels] = Count()
            child.set(value)

    def collect(self) -> Iterator[Metric]:
        family = self._family(*self._described, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Counter(_Numbers):
    """Growing numbers by label values. `set` and `replace` are for numbers that another object counts."""

    _family = CounterMetricFamily


class Gauge(_Numbers):
    """Numbers that rise and fall, by label values."""

    _family = GaugeMetricFamily

    def replace_states(self, current: Mapping[Labels, StrEnum], states: Iterable[StrEnum]) -> None:
        """`replace` with one series for each of `states`, the last label: 1 for the current one, else 0."""
        self.replace(
            {(*labels, state.value): state is now for labels, now in current.items() for state in tuple(states)}
        )


class Histogram(_Labelled[Buckets]):
    """Histograms by label values; `buckets` are ascending upper bounds."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        labels: str = "",
        *,
        buckets: Sequence[float],
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        super().__init__(registry, name, documentation, labels, partial(Buckets, self._bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._described, labels=self._labels)
        bounds = [str(floatToGoString(bound)) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for values, child in self._children.items():
            family.add_metric(values, list(zip(bounds, accumulate(child.counts), strict=True)), child.total)
        yield family


# --- several workers ---

SUMMED_GAUGES = frozenset({"warmroute_in_flight_requests", "warmroute_pod_in_flight_requests", "warmroute_index_bytes"})
EQUAL_COUNTERS = frozenset({"warmroute_kv_events", "warmroute_policy_reloads"})
"""Every worker counts the same events. The largest number is used: that of a restarted worker is smaller."""
MINIMUM_GAUGES = frozenset({"warmroute_kv_stream_complete", "warmroute_index_holder_complete"})
"""1 only if it is 1 in every worker."""

PROCESS_PREFIX = "process_"
"""Families whose samples have the label `worker`."""

Found: TypeAlias = tuple[str, dict[str, str], float]
"""Name, labels and value of a sample."""
Dump: TypeAlias = Mapping[str, list[Found]]
"""Samples by family."""

_decode = msgspec.msgpack.Decoder(dict[str, list[Found]]).decode


async def dump_metrics(registry: CollectorRegistry) -> bytes:
    """The samples that `merge_metrics` needs from this worker, collected one family in each turn of the event loop."""
    families: dict[str, list[Found]] = {}
    for family in registry.collect():
        if _is_merged(family):
            families[family.name] = [sample[:3] for sample in family.samples]
        await asyncio.sleep(0)
    return msgspec.msgpack.encode(families)


def merge_metrics(registry: CollectorRegistry, others: Iterable[bytes]) -> Iterator[Metric]:
    """The families of all workers. Raises `ValueError` where one of `others` is not a dump."""
    dumps = [_decode(dump) for dump in others]
    return (_merged(family, dumps) for family in registry.collect())


def _is_merged(family: Metric) -> bool:
    return (
        family.type != "gauge"
        or family.name in SUMMED_GAUGES | MINIMUM_GAUGES
        or family.name.startswith(PROCESS_PREFIX)
    )


def _merged(family: Metric, others: list[dict[str, list[Found]]]) -> Metric:
    """One family of all workers; series that only other workers have are last."""
    if not _is_merged(family):
        return family
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for samples in ([sample[:3] for sample in family.samples], *(dump.get(family.name, []) for dump in others)):
        for name, labels, value in samples:
            values.setdefault((name, tuple(labels.items())), []).append(value)
    join = min if family.name in MINIMUM_GAUGES else max if family.name in EQUAL_COUNTERS else sum
    result = Metric(family.name, family.documentation, family.type)
    result.samples = [Sample(name, dict(labels), join(found)) for (name, labels), found in values.items()]
    return result
