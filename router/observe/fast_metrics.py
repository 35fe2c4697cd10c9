"""Metrics: their declarations, their counting at a tenth of the cost of `prometheus_client`, and their text.

A declaration is one value for the code that counts, the reference page, dashboards and alerts. Counting needs no locks,
because only the event loop counts, and buckets are found by bisection.

The text is rendered in small pieces, so that the event loop serves requests in between. Prometheus asks for
OpenMetrics, which has exemplars: of latencies, the latest recorded trace of each bucket. There are no native
histograms: they need the protobuf format, which `prometheus_client` does not write; Prometheus 3 stores the histograms
of both texts as native ones by `convert_classic_histograms_to_nhcb`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import accumulate, chain, islice
from time import time
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString
from typing_extensions import TypeVar as DefaultedTypeVar

MetricT = DefaultedTypeVar("MetricT", default=Any)


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Declaration(msgspec.Struct, Generic[MetricT], frozen=True):
    """One metric, which a `Registry` makes. `name` is without the suffixes of samples; it ends with the unit."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    """Ascending upper bounds (inclusive) of a histogram, without infinity."""
    exemplars: bool = False
    """Whether its buckets name recorded traces."""

    @property
    def series(self) -> str:
        """The name of its samples; those of a histogram add `_bucket`, `_sum` or `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def counter(name: str, text: str, labels: str = "") -> Declaration[Counter]:
    """A number that only grows. `labels` are names separated by spaces."""
    return Declaration(MetricKind.COUNTER, name, text, tuple(labels.split()))


def gauge(name: str, text: str, labels: str = "") -> Declaration[Gauge]:
    return Declaration(MetricKind.GAUGE, name, text, tuple(labels.split()))


def histogram(
    name: str, text: str, labels: str = "", *, buckets: tuple[float, ...], exemplars: bool = False
) -> Declaration[Histogram]:
    """Values counted by upper bound."""
    bounds = tuple(map(float, buckets))
    return Declaration(MetricKind.HISTOGRAM, name, text, tuple(labels.split()), bounds, exemplars)


# --- the metrics ---

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
        self.children = _Children(make)
        """By label values; made when they are first looked up."""
        if not declared.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _Child:
        return self.children[values]

    def items(self) -> Iterable[tuple[Labels, _Child]]:
        return self.children.items()

    def remove_where(self, matches: Callable[[Labels], bool]) -> None:
        for values in [values for values in self.children if matches(values)]:
            del self.children[values]

    def series(self) -> dict[Labels, Numbers]:
        return {labels: child.numbers() for labels, child in self.children.items()}

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
        self.children.clear()
        for labels, value in values.items():
            child = self.children[labels] = Count()
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
            child = self.children.get(labels)
            for at, exemplar in (child.exemplars or {}).items() if child else ():
                buckets[at] = (*buckets[at], exemplar)
            family.add_metric(labels, buckets, total)
        return family


METRICS: Mapping[MetricKind, Callable[[CollectorRegistry, Declaration], Labelled[Any]]] = {
    MetricKind.COUNTER: Counter,
    MetricKind.GAUGE: Gauge,
    MetricKind.HISTOGRAM: Histogram,
}


PIECE_SAMPLES = 200
"""Samples that are rendered at once, in a millisecond or less."""
HEADER_LINES = 2
"""HELP and TYPE of a family."""
_REFUSED = re.compile(r"q=0(\.0*)?|version=0\..*")


class TextFormat(NamedTuple):
    """A text format. `encode` adds `end`, which is written once, to the text of each family."""

    content_type: str
    encode: Callable[[Collector], bytes]
    end: bytes = b""


PLAIN = TextFormat("text/plain; version=0.0.4; charset=utf-8", generate_latest)
OPEN_METRICS = TextFormat(
    openmetrics.CONTENT_TYPE_LATEST,
    partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8),  # our names need no escaping, which is slow
    b"# EOF\n",
)


def accepted_format(accept: str) -> TextFormat:
    """The format for a scraper with this `Accept` header: the plain one unless it asks for the other."""
    for one in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        if kind == "application/openmetrics-text" and not any(_REFUSED.fullmatch(part) for part in parameters):
            return OPEN_METRICS
    return PLAIN


class Registry(CollectorRegistry):
    """The declared metrics, and other collectors, which can be rendered one by one in the order of their
    registration."""

    def __init__(self, *chapters: ModuleType) -> None:
        super().__init__()
        self.collectors: list[Collector] = []
        self._declared: dict[str, Any] = {}
        for one in chain.from_iterable(vars(chapter).values() for chapter in chapters):
            if isinstance(one, Declaration):
                self[one]

    def __getitem__(self, declared: Declaration[MetricT]) -> MetricT:
        """The metric, from its first use on."""
        if declared.name not in self._declared:
            self._declared[declared.name] = METRICS[declared.kind](self, declared)
        return cast(MetricT, self._declared[declared.name])

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def pieces(registry: Registry, text_format: TextFormat = PLAIN) -> Iterator[bytes]:
    """The text in pieces of about `PIECE_SAMPLES` samples."""
    for collector in registry.collectors:
        if isinstance(collector, Labelled):
            yield from _pieces_of(collector, text_format)
        else:
            for family in collector.collect():
                yield _text(family, text_format)
    yield text_format.end


def _pieces_of(metric: Labelled[Any], text_format: TextFormat) -> Iterator[bytes]:
    rows, header = iter(metric.series().items()), b""
    step = PIECE_SAMPLES // (len(metric.declared.buckets) + 3)
    while (text := _text(metric.family(islice(rows, step)), text_format)) != header:
        yield text.removeprefix(header)
        header = b"".join(text.splitlines(keepends=True)[:HEADER_LINES])


def _text(family: Metric, text_format: TextFormat) -> bytes:
    only = cast(Collector, SimpleNamespace(collect=lambda: (family,)))
    return text_format.encode(only).removesuffix(text_format.end)
