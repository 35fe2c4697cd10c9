"""PromQL built from declared metrics, so that a query can only name metrics, labels and buckets that exist.

A scrape by Prometheus's operator adds labels of the target, such as `pod` for the router's pod. A metric's own label of
that name becomes `exported_pod`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.observe.fast_metrics import Declaration, MetricKind

ROUTER = "namespace, pod"
"""The labels of one router."""
TARGET_LABELS = frozenset({"pod", "endpoint", "namespace", "container", "job", "instance"})
_ABBREVIATED = ("sum", "max", "min", "avg")


@dataclass(frozen=True, slots=True)
class Expr:
    """A query and the metrics that it uses."""

    text: str
    uses: tuple[Declaration, ...]

    def _with(self, operator: str, other: Expr | float) -> Expr:
        if isinstance(other, Expr):
            return Expr(f"({self.text} {operator} {other.text})", (*self.uses, *other.uses))
        return Expr(f"({self.text} {operator} {other:g})", self.uses)

    def __truediv__(self, other: Expr | float) -> Expr:
        return self._with("/", other)

    def __mul__(self, other: Expr | float) -> Expr:
        return self._with("*", other)

    def __add__(self, other: Expr | float) -> Expr:
        return self._with("+", other)

    def __sub__(self, other: Expr | float) -> Expr:
        return self._with("-", other)

    def __gt__(self, other: Expr | float) -> Expr:
        return self._with(">", other)

    def __lt__(self, other: Expr | float) -> Expr:
        return self._with("<", other)

    def is_(self, value: float) -> Expr:
        """The series that have this value."""
        return self._with("==", value)

    def and_(self, other: Expr) -> Expr:
        """The series that `other` has as well."""
        return self._with("and", other)

    def where(self, labels: str, other: Expr) -> Expr:
        """The series for which `other` has one with the same `labels`."""
        return Expr(f"({self.text} and on ({labels}) {other.text})", (*self.uses, *other.uses))

    def or_(self, other: Expr) -> Expr:
        """These series, and those of `other` that are missing."""
        return self._with("or", other)

    def of_total(self, labels: str, total: Expr) -> Expr:
        """Divided by the total with the same `labels`, of which there is one for many series."""
        return Expr(f"({self.text} / on ({labels}) group_left () {total.text})", (*self.uses, *total.uses))

    @property
    def bare(self) -> str:
        """The query without outer parentheses."""
        text = self.text
        return text[1:-1] if text.startswith("(") and _closes_last(text) else text


def _closes_last(text: str) -> bool:
    """Whether the first parenthesis is closed by the last character."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return at == len(text) - 1
    return False


def name_of(declared: Declaration, label: str) -> str:
    """A label of the metric as Prometheus has it. Raises `ValueError` if the metric has no such label."""
    if label not in declared.labels:
        raise ValueError(f"{declared.name} has no label {label!r}; it has {', '.join(declared.labels) or 'none'}")
    return f"exported_{label}" if label in TARGET_LABELS else label


@dataclass(frozen=True, slots=True)
class Source:
    """Which series are selected, and over which time rates are taken. `by` names the metric's own labels, separated by
    spaces; `each` is added to all aggregations: labels of the target."""

    matchers: tuple[str, ...]
    window: str
    each: str = ""

    def select(self, declared: Declaration, suffix: str = "", **match: str) -> Expr:
        """The series of a metric whose labels have these values; `~...` is a regular expression."""
        matchers = list(self.matchers)
        for label, value in match.items():
            operator, value = ("=~", value[1:]) if value.startswith("~") else ("=", value)
            matchers.append(f'{name_of(declared, label.rstrip("_"))}{operator}"{value}"')
        return Expr(
            f"{declared.series}{suffix}{{{','.join(matchers)}}}" if matchers else declared.series + suffix, (declared,)
        )

    def total(self, how: str, declared: Declaration, by: str = "", **match: str) -> Expr:
        """The `sum`, `max`, `min` or `avg` of a gauge."""
        assert how in _ABBREVIATED
        return self._aggregated(how, declared, by, self.select(declared, **match))

    def rate(self, declared: Declaration, by: str = "", **match: str) -> Expr:
        """Increase of a counter per second."""
        return self._rate(declared, "", by, match)

    def increase(self, declared: Declaration, by: str = "", **match: str) -> Expr:
        """Increase of a counter in the window, or the number of a histogram's values."""
        return self._rate(declared, "_count" if declared.kind is MetricKind.HISTOGRAM else "", by, match, "increase")

    def mean(self, declared: Declaration, by: str = "", **match: str) -> Expr:
        """Mean of a histogram's values."""
        return self._rate(declared, "_sum", by, match) / self._rate(declared, "_count", by, match)

    def sum_rate(self, declared: Declaration, by: str = "", **match: str) -> Expr:
        """Increase per second of the sum of a histogram's values."""
        return self._rate(declared, "_sum", by, match)

    def quantile(self, share: float, declared: Declaration, by: str = "", **match: str) -> Expr:
        """A quantile of a histogram's values."""
        buckets = self._rate(declared, "_bucket", f"{by} le", match)
        return Expr(f"histogram_quantile({share:g}, {buckets.text})", buckets.uses)

    def share_above(self, bound: float, declared: Declaration, by: str = "", **match: str) -> Expr:
        """Share of a histogram's values above a bound. Raises `ValueError` if no bucket has it."""
        if bound not in declared.buckets:
            raise ValueError(f"{declared.name} has no bucket {bound:g}")
        below = self._rate(declared, "_bucket", by, {**match, "le": f"{float(bound)}"})
        ratio = below / self._rate(declared, "_count", by, match)
        return Expr(f"(1 - {ratio.text})", ratio.uses)

    def _rate(self, declared: Declaration, suffix: str, by: str, match: dict[str, str], function: str = "rate") -> Expr:
        if declared.kind is MetricKind.GAUGE or bool(suffix) != (declared.kind is MetricKind.HISTOGRAM):
            raise ValueError(f"{declared.name} is a {declared.kind}")
        le = match.pop("le", None) if "le" in (match := dict(match)) else None
        selected = self.select(declared, suffix, **match)
        if le is not None:
            text = (
                f'{selected.text[:-1]},le="{le}"}}' if selected.text.endswith("}") else f'{selected.text}{{le="{le}"}}'
            )
            selected = Expr(text, selected.uses)
        return self._aggregated("sum", declared, by, Expr(f"{function}({selected.text}[{self.window}])", selected.uses))

    def _aggregated(self, how: str, declared: Declaration, by: str, inner: Expr) -> Expr:
        labels = ["le" if label == "le" else name_of(declared, label) for label in by.split()]
        group = ", ".join([*([self.each] if self.each else []), *labels])
        return Expr(f"{how} by ({group}) ({inner.text})" if group else f"{how}({inner.text})", inner.uses)


DASHBOARD = Source(('namespace=~"$namespace"', 'pod=~"$router"'), "$__rate_interval")
"""The routers that are selected at the top of a dashboard."""
PUBLISHERS = Source(('namespace=~"$namespace"',), "$__rate_interval")
ALERT = Source((), "5m", each="namespace")
"""All routers of a namespace together."""
SOON = replace(ALERT, window="2m")
EACH_ROUTER = Source((), "5m", each=ROUTER)
