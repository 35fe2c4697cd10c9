"""The outcome of each simulated request, and the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from router.admission.tenant import Slo

Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestOutcome:
    """One request. Times are in ms since its arrival; NaN if it was refused or never ended."""

    kind: str
    arrived_ms: float
    prompt_tokens: int
    output_tokens: int
    pod: str = ""
    cached_tokens: int = 0
    pulled_tokens: int = 0
    predicted_cached_tokens: int = 0
    predicted_ms: float = math.nan
    ttft_ms: float = math.nan
    e2e_ms: float = math.nan
    regret_ms: float = math.nan
    """Expected time to first token beyond that of the best pod, by the true state at the time of the decision."""
    refused: str = ""
    waited_ms: float = 0.0
    """Until it was sent to a pod or refused."""
    prefill_ms: float = 0.0
    """The time of the prompt tokens that its pod computed."""
    idle_prefill_ms: float = 0.0
    """Prefill of the whole prompt on an idle pod."""

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; 0 for one token."""
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class PodUse:
    requests: int
    computed_tokens: int
    busy_ms: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: Sequence[RequestOutcome]
    pods: Mapping[str, PodUse]
    duration_ms: float
    ideal_cached_tokens: int
    """Prompt tokens that one cache without eviction would have saved."""
    last_start_ms: float = 0.0
    """When the last session started."""
    unsent: int = 0
    """Requests that were not sent, because one before them in their session was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one run. Shares are 0..1. A refused request misses the SLO, as do those that would have followed
    it in its session, and counts in no other figure.

    `goodput_per_s` counts requests within the SLO that arrived after the first quarter of the time in which sessions
    start: the fleet is idle at the beginning, and nothing new comes at the end."""

    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    ideal_cached_tokens: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    slo_share: float
    accepted_slo_share: float
    """`slo_share` of the requests that were not refused."""
    goodput_per_s: float
    peak_over_mean: float
    predictions_exact_share: float
    regret_mean_ms: float
    preemptions: int
    busy_share: float
    prefill_s: float
    """In which pods computed prompts."""
    cached_share_by_kind: Mapping[str, float]

    @property
    def of_ideal(self) -> float:
        """Cached tokens relative to a cache that never evicts."""
        return self.cached_tokens / self.ideal_cached_tokens if self.ideal_cached_tokens else 1.0


class AnsweredPrompt(Protocol):
    """A request with an answer, simulated or real."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def cached_tokens(self) -> int:
        """Those that were not computed: found in a cache, or pulled from one."""


def cached_share(answered: Iterable[AnsweredPrompt]) -> float:
    """The hit rate of all reports: cached prompt tokens divided by prompt tokens, over answered requests; 0 without
    prompt tokens. Of metrics, `warmroute_cached_tokens_delivered` and `warmroute_prompt_tokens` have the same ratio."""
    pairs = [(one.cached_tokens, one.prompt_tokens) for one in answered]
    return sum(cached for cached, _ in pairs) / max(sum(tokens for _, tokens in pairs), 1)


def figures(run: Run, slo: Slo, slo_by_kind: Mapping[str, Slo] = MappingProxyType({})) -> RunFigures:
    good = [one for one in run.outcomes if not one.refused]
    slos = [slo_by_kind.get(one.kind, slo) for one in good]
    ttft_ms, tpot_ms = _array(one.ttft_ms for one in good), _array(one.tpot_ms for one in good)
    ttft_limit_ms = _array(slo.ttft_limit_ms(one.idle_prefill_ms) for slo, one in zip(slos, good, strict=True))
    has_met = (ttft_ms <= ttft_limit_ms) & (tpot_ms <= _array(slo.tpot_ms for slo in slos))
    met = int(np.sum(has_met))
    regret_ms = _array(one.regret_ms for one in good if not math.isnan(one.regret_ms))
    work = [pod.computed_tokens for pod in run.pods.values()]
    return RunFigures(
        requests=len(run.outcomes),
        refused=len(run.outcomes) - len(good),
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_tokens=sum(one.cached_tokens for one in good),
        cached_share=cached_share(good),
        ideal_cached_tokens=run.ideal_cached_tokens,
        ttft_mean_ms=float(ttft_ms.mean()) if good else math.nan,
        ttft_p50_ms=_percentile(ttft_ms, 50),
        ttft_p90_ms=_percentile(ttft_ms, 90),
        ttft_p99_ms=_percentile(ttft_ms, 99),
        tpot_p50_ms=_percentile(tpot_ms, 50),
        tpot_p99_ms=_percentile(tpot_ms, 99),
        slo_share=met / max(len(run.outcomes) + run.unsent, 1),
        accepted_slo_share=met / max(len(good), 1),
        goodput_per_s=_goodput_per_s(run, _array(one.arrived_ms for one in good)[has_met]),
        peak_over_mean=max(work) * len(work) / sum(work) if sum(work) else 1.0,
        predictions_exact_share=sum(one.cached_tokens == one.predicted_cached_tokens for one in good)
        / max(len(good), 1),
        regret_mean_ms=float(regret_ms.mean()) if len(regret_ms) else math.nan,
        preemptions=sum(pod.preemptions for pod in run.pods.values()),
        busy_share=sum(pod.busy_ms for pod in run.pods.values()) / max(len(run.pods) * run.duration_ms, 1e-9),
        prefill_s=sum(one.prefill_ms for one in good) / 1000,
        cached_share_by_kind={
            kind: cached_share(one for one in good if one.kind == kind) for kind in sorted({one.kind for one in good})
        },
    )


def _goodput_per_s(run: Run, met_ms: Floats) -> float:
    """`met_ms`: arrivals of the requests within the SLO."""
    start_ms, end_ms = run.last_start_ms / 4, run.last_start_ms
    if not end_ms:
        return len(met_ms) / run.duration_ms * 1000 if run.duration_ms else 0.0
    return int(np.sum((met_ms >= start_ms) & (met_ms <= end_ms))) / (end_ms - start_ms) * 1000


def _array(values: object) -> Floats:
    return np.fromiter(values, np.float64)  # type: ignore[call-overload,no-any-return]


def _percentile(values: Floats, percent: float) -> float:
    """Nearest rank; NaN without values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else math.nan
