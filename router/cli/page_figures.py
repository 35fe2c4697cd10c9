"""Figures of the operators' page, from its snapshots: rates, quantiles and shares between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub

import msgspec

from router.frontends.admin.page_notices import Notice
from router.frontends.admin.page_snapshot import DecisionRow, PodRow
from router.observe.declared import of_decisions, of_requests
from router.observe.declared.declaration import Declaration
from router.observe.hit_worth import CHOSEN, ROUND_ROBIN
from router.observe.receipts import CLIENT_GONE

TOKEN_LINES = {
    "available": (of_requests.AVAILABLE_TOKENS, of_requests.PROMPT_TOKENS),
    "captured": (of_requests.CAPTURED_TOKENS, of_requests.PROMPT_TOKENS),
    "delivered": (of_requests.DELIVERED_TOKENS, of_requests.REPORTED_PROMPT_TOKENS),
}
_Rows = list[tuple[list[str], list[float]]]


class Snapshot(msgspec.Struct):
    """One snapshot of a router, without what `warmroute top` does not show."""

    at_s: float
    pods: list[PodRow]
    decisions: list[DecisionRow]
    metrics: dict[str, _Rows]
    bounds: dict[str, list[float]]
    pods_not_shown: int = 0
    notices: list[Notice] = []
    price: float | None = None
    currency: str = ""


@dataclass(frozen=True, slots=True)
class PageFigures:
    """What happened between two snapshots; since the start of the router if there is no earlier one."""

    now: Snapshot
    since: Snapshot | None = None

    @property
    def span_s(self) -> float | None:
        return self.now.at_s - self.since.at_s if self.since else None

    @property
    def requests(self) -> float:
        """Requests that ended."""
        return sum(value for value, *_ in self._grown(of_requests.CLASS_REQUESTS).values())

    @property
    def failures(self) -> float:
        """Those of them that failed, unless their client left."""
        found = self._grown(of_requests.CLASS_REQUESTS, 1)
        return sum(value for result, (value, *_) in found.items() if result not in ("ok", CLIENT_GONE))

    @property
    def in_flight(self) -> float:
        return sum(numbers[0] for _, numbers in self.now.metrics.get(of_requests.IN_FLIGHT.name, ()))

    def ttft_s(self, share: float) -> float | None:
        """A quantile of the time to first token; None without one, infinite beyond the last bucket."""
        numbers = self._grown(of_requests.TTFT_S).get("", [])
        return quantile(self.now.bounds.get(of_requests.TTFT_S.name, ()), numbers[:-1], share)

    def token_shares(self) -> dict[str, float | None]:
        """Shares of prompt tokens by line; None without tokens."""
        return {line: self._share(part, whole) for line, (part, whole) in TOKEN_LINES.items()}

    def saved_s(self, of_gpus: bool = False) -> tuple[float, float]:
        """Prefill seconds of pods, or of their GPUs, that hits saved, and that they would have with round robin."""
        declared = of_decisions.PREFILL_SAVED_GPU_S if of_gpus else of_decisions.PREFILL_SAVED_S
        found = self._grown(declared, 0)
        chosen, other = (found.get(placement, [0.0])[0] for placement in (CHOSEN, ROUND_ROBIN))
        return chosen, other

    def _share(self, part: Declaration, whole: Declaration) -> float | None:
        parts, wholes = (sum(value for value, *_ in self._grown(one).values()) for one in (part, whole))
        return min(parts / wholes, 1.0) if wholes else None

    def _grown(self, declared: Declaration, at: int | None = None) -> dict[str, list[float]]:
        """How much the series of a metric grew, by the label at `at`, or all together."""
        before = _by_label(self.since.metrics.get(declared.name, ()), at) if self.since else {}
        found = _by_label(self.now.metrics.get(declared.name, ()), at)
        return {
            key: [max(value, 0.0) for value in map(sub, numbers, before[key])] if key in before else numbers
            for key, numbers in found.items()
        }


def _by_label(rows: Sequence[tuple[list[str], list[float]]], at: int | None) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for labels, numbers in rows:
        key = "" if at is None else labels[at]
        found[key] = list(map(add, found[key], numbers)) if key in found else numbers
    return found


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """By linear interpolation within a bucket, as on the page."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return float("inf")
