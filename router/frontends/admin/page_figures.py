"""Computes the figures that the operators' page shows: sums, quantiles and shares.

Metrics are those of /metrics, summed over the labels that no figure needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import add, sub
from sys import float_info
from typing import Any

import msgspec

from router.errors import UnknownEndpoint
from router.observe.declared import of_decisions, of_pods, of_process, of_requests
from router.observe.declared.declaration import Declaration
from router.observe.ended import CLIENT_GONE
from router.observe.fast_metrics import Labels, Numbers

SERVED = ("ok", CLIENT_GONE)
"""The results of requests that did not fail."""
BEYOND = float_info.max
"""A quantile above the last bucket, because JSON has no infinity."""
SHOWN: Mapping[Declaration, tuple[str, ...]] = {
    of_requests.IN_FLIGHT: (),
    of_requests.REQUESTS: ("result",),
    of_requests.CLASS_REQUESTS: ("class", "result"),
    of_requests.TTFT_S: ("class",),
    of_requests.TPOT_S: ("class",),
    of_requests.PHASE_S: ("phase",),
    of_requests.RETRIES: (),
    of_requests.REPORTED_PROMPT_TOKENS: (),
    of_requests.PROMPT_TOKENS: (),
    of_requests.AVAILABLE_TOKENS: (),
    of_requests.CAPTURED_TOKENS: (),
    of_requests.DELIVERED_TOKENS: (),
    of_requests.TENANT_IN_FLIGHT_TOKENS: ("tenant",),
    of_requests.UNREAD_PROMPTS: ("reason",),
    of_requests.SLO_REQUESTS: ("model", "met"),
    of_requests.REUSE_INTERVAL_S: ("model",),
    of_decisions.TTFT_ERROR: (),
    of_decisions.EVICTED_SOON_TOKENS: ("model",),
    of_decisions.EVICTED_SOON_S: ("model",),
    of_decisions.PLACED_PROMPT_TOKENS: ("placement",),
    of_decisions.PLACED_CACHED_TOKENS: ("placement",),
    of_decisions.PLACED_ERROR: ("model",),
    of_decisions.PREFILL_SAVED_S: ("placement",),
    of_decisions.PREFILL_SAVED_GPU_S: ("placement",),
    of_pods.TRANSFER_SLOWDOWN: ("link",),
    of_process.LOOP_LAG_S: (),
    of_process.DEGRADED_MATCHES: (),
    of_process.RECEIPTS_LOST: (),
}
"""The metrics that figures and notices need, each with the labels that it keeps."""
TOKEN_LINES = {
    "available": (of_requests.AVAILABLE_TOKENS, of_requests.PROMPT_TOKENS),
    "captured": (of_requests.CAPTURED_TOKENS, of_requests.PROMPT_TOKENS),
    "delivered": (of_requests.DELIVERED_TOKENS, of_requests.REPORTED_PROMPT_TOKENS),
}

MetricRows = list[tuple[Labels, Numbers]]
"""The series of a metric: the values of the labels that it keeps, and its numbers."""

_Key = Callable[[Labels], str | None]
"""What series are summed by; None: not this one."""


class Quantiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """Quantiles of a histogram; None without values, `BEYOND` above its last bound."""

    count: float = 0.0
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


def _first(labels: Labels) -> str:
    return labels[0] if labels else ""


class MetricsGrowth:
    """How much the metrics of a snapshot grew since an earlier one; `before`: empty for the start of the router."""

    def __init__(self, now: Mapping[str, MetricRows], before: Mapping[str, MetricRows]) -> None:
        self._now = now
        self._before = before

    def figures(self) -> dict[str, Any]:
        """What the page shows of the time between two snapshots. `failed`: requests that failed, by result, unless
        their client left; those of `classes` were decided. By placement: `placed_shares` of prompt tokens that caches
        have or would have, `saved_s` prefill seconds of pods that hits saved, `saved_gpu_s` of their GPUs.
        `degraded`: matches without the cluster index. `reuse_s`: times between two uses of a prefix, by model.
        `evicted_tokens` were evicted too soon, by model; `evicted_s`: their prefill."""
        answers = self.answers()
        return {
            "requests": sum(answers.values()),
            "failed": {result: count for result, count in answers.items() if result not in SERVED},
            "classes": self._classes(),
            "ttft_s": self.ttft_s(),
            "ttft_error": self._quantiles(of_decisions.TTFT_ERROR)[""],
            "token_shares": self.token_shares(),
            "placed_shares": self._placed_shares(),
            "saved_s": self._values(of_decisions.PREFILL_SAVED_S),
            "saved_gpu_s": self._values(of_decisions.PREFILL_SAVED_GPU_S),
            "phases_s": self._quantiles(of_requests.PHASE_S),
            "loop_lag_s": self._quantiles(of_process.LOOP_LAG_S)[""],
            "retries": self._values(of_requests.RETRIES)[""],
            "degraded": self._values(of_process.DEGRADED_MATCHES)[""],
            "unread_prompts": sum(self.unread().values()),
            "receipts_lost": self._values(of_process.RECEIPTS_LOST)[""],
            "reuse_s": self._quantiles(of_requests.REUSE_INTERVAL_S),
            "evicted_tokens": self._values(of_decisions.EVICTED_SOON_TOKENS),
            "evicted_s": self._values(of_decisions.EVICTED_SOON_S),
        }

    def unread(self) -> dict[str, float]:
        return self._values(of_requests.UNREAD_PROMPTS)

    def slo_requests(self, met: str) -> defaultdict[str, float]:
        """Those that met the SLO of their model ("true"), or did not, by model."""
        return self._values(of_requests.SLO_REQUESTS, lambda labels: labels[0] if labels[-1] == met else None)

    def answers(self) -> dict[str, float]:
        """The answers that clients got, by result, most frequent first; also those without a class or pod. Without the
        answers to unknown URLs, which are of no API."""
        found = self._values(of_requests.REQUESTS)
        found.pop(UnknownEndpoint.code, None)
        return {result: found[result] for result in sorted(found, key=found.__getitem__, reverse=True) if found[result]}

    def ttft_s(self) -> Quantiles:
        return self._quantiles(of_requests.TTFT_S, lambda _: "")[""]

    def token_shares(self) -> dict[str, float | None]:
        """Shares of prompt tokens, by line; None without tokens."""
        found: dict[str, float | None] = {}
        for line, (part, whole) in TOKEN_LINES.items():
            tokens = self._values(whole)[""]
            found[line] = min(self._values(part)[""] / tokens, 1.0) if tokens else None
        return found

    def _placed_shares(self) -> dict[str, float]:
        cached = self._values(of_decisions.PLACED_CACHED_TOKENS)
        tokens = self._values(of_decisions.PLACED_PROMPT_TOKENS)
        return {placement: cached[placement] / whole for placement, whole in tokens.items() if whole}

    def _classes(self) -> dict[str, dict[str, Any]]:
        """A request failed if its result is an error and its client did not leave."""
        requests = of_requests.CLASS_REQUESTS
        failures = self._values(requests, lambda labels: None if labels[1] in SERVED else labels[0])
        ttft_s, tpot_s = self._quantiles(of_requests.TTFT_S), self._quantiles(of_requests.TPOT_S)
        return {
            name: {"requests": ended, "failures": failures[name], "ttft_s": ttft_s[name], "tpot_s": tpot_s[name]}
            for name, ended in self._values(requests).items()
        }

    def _values(self, declared: Declaration, key: _Key = _first) -> defaultdict[str, float]:
        return defaultdict(float, {name: value for name, (value, *_) in self._grown(declared, key).items()})

    def _quantiles(self, declared: Declaration, key: _Key = _first) -> defaultdict[str, Quantiles]:
        grown = self._grown(declared, key).items()
        return defaultdict(Quantiles, {name: quantiles(declared.buckets, counts) for name, (*counts, _) in grown})

    def _grown(self, declared: Declaration, key: _Key) -> dict[str, Numbers]:
        before = _summed(self._before.get(declared.name, ()), key)
        return {
            name: [max(value, 0.0) for value in map(sub, numbers, before[name])] if name in before else numbers
            for name, numbers in _summed(self._now.get(declared.name, ()), key).items()
        }


def _summed(rows: Sequence[tuple[Labels, Numbers]], key: _Key) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for labels, numbers in rows:
        if (name := key(labels)) is not None:
            found[name] = list(map(add, found[name], numbers)) if name in found else numbers
    return found


def quantiles(bounds: Sequence[float], counts: Sequence[float]) -> Quantiles:
    """`counts`: of each bucket, the last without a bound."""
    return Quantiles(sum(counts), *(quantile(bounds, counts, share) for share in (0.5, 0.9, 0.95, 0.99)))


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """By linear interpolation within a bucket."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return BEYOND
