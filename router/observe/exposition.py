"""Renders metrics as text, in small pieces, so that the event loop serves requests in between.

Prometheus asks for OpenMetrics, which has exemplars: of latencies, the latest recorded trace of each bucket. There are
no native histograms: they need the protobuf format, which `prometheus_client` does not write; Prometheus 3 stores the
histograms of both texts as native ones by `convert_classic_histograms_to_nhcb`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from router.observe.declared.declaration import Declaration, MetricT
from router.observe.fast_metrics import METRICS, Labelled

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
