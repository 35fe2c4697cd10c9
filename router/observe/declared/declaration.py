"""What describes a metric: one value for the code that counts, the reference page, dashboards and alerts."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic

import msgspec
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from router.observe.fast_metrics import Counter, Gauge, Histogram

MetricT = TypeVar("MetricT", default=Any)


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
