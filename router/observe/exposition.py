"""Renders metrics as text, in small pieces, so that the event loop serves requests in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import add
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from router.observe.declared.declaration import Join
from router.observe.declared.metric_catalog import DECLARED
from router.observe.fast_metrics import Labelled, Labels, Numbers

PIECE_SAMPLES = 200
"""Samples that are rendered at once, in a millisecond or less."""
HEADER_LINES = 2
"""HELP and TYPE of a family."""
_JOINS: Mapping[Join, Callable[[float, float], float]] = {Join.SUM: add, Join.MAX: max, Join.MIN: min}

Dump = Callable[[str], Mapping[Labels, Numbers]]
"""The series of another worker by name of the family. Raises `ValueError` for invalid ones."""


class Registry(CollectorRegistry):
    """A registry whose collectors can be rendered one by one, in the order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def pieces(registry: Registry, others: Sequence[Dump] = ()) -> Iterator[bytes]:
    """The text in pieces of about `PIECE_SAMPLES` samples, some of them empty, with the series of other workers."""
    for collector in registry.collectors:
        if isinstance(collector, Labelled):
            yield from _pieces_of(collector, others)
        else:
            for family in collector.collect():
                _add_samples(family, others)
                yield _text(family)


def _pieces_of(metric: Labelled[Any], others: Sequence[Dump]) -> Iterator[bytes]:
    series, join = metric.series(), metric.declared.join
    for other in others if join is not Join.SAME else ():
        _merge(series, other(metric.declared.name), join)
        yield b""
    rows, header = iter(series.items()), b""
    step = PIECE_SAMPLES // (len(metric.declared.buckets) + 3)
    while (text := _text(metric.family(islice(rows, step)))) != header:
        yield text.removeprefix(header)
        header = b"".join(text.splitlines(keepends=True)[:HEADER_LINES])


def _merge(series: dict[Labels, Numbers], other: Mapping[Labels, Numbers], join: Join) -> None:
    """Add the series of another worker; those that only it has are last."""
    joined = _JOINS[join]
    for labels, numbers in other.items():
        own = series.get(labels)
        series[labels] = numbers if own is None else list(map(joined, own, numbers))


def _add_samples(family: Metric, others: Iterable[Dump]) -> None:
    """Add the series of other workers, which are labelled by their numbers."""
    names = DECLARED[family.name].labels
    for other in others:
        for labels, (value,) in other(family.name).items():
            family.samples.append(Sample(family.samples[0].name, dict(zip(names, labels, strict=True)), value))


def _text(family: Metric) -> bytes:
    return generate_latest(_OneFamily(family))


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
