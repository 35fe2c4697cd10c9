"""Figures of a demo run, and the table that compares policies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from loadtest.simulator.outcome import cached_share
from loadtest.simulator.traffic import IdealCache, hashed_request
from loadtest.tables import legend, text_table
from loadtest.traffic.load_driver import DriveResults, RequestResult
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

COLUMNS = ("policy", "cached", "of ideal", "p50 ms", "p99 ms", "work", "peak", "exact", "errors")
ONE_RUN = "Each row is one run: a small difference between rows is chance."
_BARS = "▁▂▃▄▅▆▇█"
ENGINE_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one policy.

    Shares are 0..1; the ideal is NaN if it is unknown. Work is uncached prompt tokens plus output tokens. Times start
    when a request was due.
    """

    policy: str
    requests: int
    errors: int
    cached_share: float
    ideal_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    exact_predictions_share: float
    work_by_pod: Mapping[str, int]

    @property
    def of_ideal(self) -> float:
        """Cached share relative to an infinite cache."""
        return self.cached_share / self.ideal_share if self.ideal_share else 1.0

    @property
    def max_over_mean(self) -> float:
        """Work of the busiest pod relative to the mean: from 1, if all are equal, to the number of pods."""
        work = self.work_by_pod.values()
        return max(work) * len(work) / sum(work) if sum(work) else 1.0


def figures(policy: str, results: DriveResults, ideal_cached_tokens: float, pods: Iterable[str]) -> Figures:
    """The figures of one run. `ideal_cached_tokens`: what an infinite cache would have saved; NaN if unknown."""
    good = [result for result in results.served if not result.error]
    work: Counter[str] = Counter(dict.fromkeys(pods, 0))
    for result in good:
        work[result.pod] += result.prompt_tokens - result.cached_tokens + result.output_tokens
    ttft_ms = ttfts_ms(good)
    prompt_tokens = sum(result.prompt_tokens for result in good)
    return Figures(
        policy=policy,
        requests=len(results.served),
        errors=len(results.served) - len(good),
        cached_share=cached_share(good),
        ideal_share=ideal_cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        ttft_p50_ms=percentile(ttft_ms, 0.50),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        exact_predictions_share=sum(result.predicted_cached_tokens == result.cached_tokens for result in good)
        / max(len(good), 1),
        work_by_pod=dict(sorted(work.items())),
    )


def ideal_cached_tokens(served: Iterable[RequestResult], tokenizer: Tokenizer) -> int:
    """Tokens that an infinite cache would have saved of these chats in this order, without failed ones."""
    cache, template = IdealCache(ENGINE_BLOCK_TOKENS), ChatTemplate(tokenizer)
    found = 0
    for result in served:
        if not result.error:
            prompt, answer = tokenizer.encode(template.render(result.asked)), tokenizer.encode(result.text)
            found += cache.serve(hashed_request(prompt, answer, ENGINE_BLOCK_TOKENS))
    return found


def ttfts_ms(served: Iterable[RequestResult]) -> list[float]:
    return [result.ttft_s * 1000 for result in served if result.ttft_s is not None]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN without values."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else math.nan


def table(rows: Sequence[Figures], title: str) -> Table:
    """The comparison of policies, in at most 80 columns."""
    shown = text_table(
        COLUMNS,
        map(_cells, rows),
        title=title,
        caption=legend(COLUMNS, ONE_RUN),
    )
    ideal_share = max((row.ideal_share for row in rows if not math.isnan(row.ideal_share)), default=math.nan)
    if not math.isnan(ideal_share):
        shown.add_row("infinite cache", f"{ideal_share:.1%}", "100%", *[""] * 6, style="dim")
    return shown


def _cells(row: Figures) -> Sequence[str]:
    return (
        row.policy,
        f"{row.cached_share:.1%}",
        "" if math.isnan(row.ideal_share) else f"{row.of_ideal:.0%}",
        f"{row.ttft_p50_ms:.0f}",
        f"{row.ttft_p99_ms:.0f}",
        bars(list(row.work_by_pod.values())),
        f"{row.max_over_mean:.2f}",
        f"{row.exact_predictions_share:.1%}",
        str(row.errors),
    )


def bars(values: Sequence[float]) -> str:
    """A bar character for each value; the highest value is full."""
    top = max(values, default=0) or 1
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)
