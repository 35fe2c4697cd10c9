"""Figures of a load test or demo run: the table that compares policies, and the display of a run's progress."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from router.cli.load_driver import DriveResults, OnProgress, RequestResult
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.report import legend, text_table
from router.sim.virtual.outcome import cached_share
from router.sim.virtual.traffic import IdealCache, hashed_request

COLUMNS = ("policy", "cached", "of ideal", "p50 ms", "p99 ms", "work", "peak", "exact", "errors")
ONE_RUN = "Each row is one run: a small difference between rows is chance."
_BARS = "▁▂▃▄▅▆▇█"


ENGINE_BLOCK_TOKENS = 16
LATE_TOLERATED_MS = 5.0
LATE_TOLERATED_SHARE = 0.1
"""Share of the median time to first token. A client that exceeds both limits was too slow for its load."""

REFRESH_S = 0.5
LINE_EVERY_S = 5.0
RECENT = 200
"""Number of requests in the displayed figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The limits of a good answer: its time to first token, and the mean time of each further token."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    def met_by(self, result: RequestResult) -> bool:
        """False for a failed request and for an answer without tokens."""
        if result.error or result.ttft_s is None:
            return False
        return result.ttft_s * 1000 <= self.ttft_ms and (tpot_ms(result) or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one policy.

    Shares are 0..1; the ideal is NaN if it is unknown. Work is uncached prompt tokens plus output tokens. Goodput is
    the requests that met the objective, per second between the first and last due time. Times start when a request
    was due; `late_p99_ms` is the part that the client's lateness added.
    """

    policy: str
    requests: int
    errors: int
    cached_share: float
    ideal_share: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    within_objective_share: float
    goodput_per_s: float
    exact_predictions_share: float
    work_by_pod: Mapping[str, int]
    late_p99_ms: float

    @property
    def of_ideal(self) -> float:
        """Cached share relative to an infinite cache."""
        return self.cached_share / self.ideal_share if self.ideal_share else 1.0

    @property
    def driver_was_late(self) -> bool:
        """Whether the client was so late that these figures describe the client and not the router."""
        return self.late_p99_ms > max(LATE_TOLERATED_MS, LATE_TOLERATED_SHARE * self.ttft_p50_ms)

    @property
    def max_over_mean(self) -> float:
        """Work of the busiest pod relative to the mean: from 1, if all are equal, to the number of pods."""
        work = self.work_by_pod.values()
        return max(work) * len(work) / sum(work) if sum(work) else 1.0


def figures(
    policy: str,
    results: DriveResults,
    ideal_cached_tokens: float,
    pods: Iterable[str],
    objective: Objective = Objective(),  # noqa: B008 (frozen)
) -> Figures:
    """The figures of one run. `ideal_cached_tokens`: what an infinite cache would have saved; NaN if unknown."""
    good = [result for result in results.served if not result.error]
    work: Counter[str] = Counter(dict.fromkeys(pods, 0))
    for result in good:
        work[result.pod] += result.prompt_tokens - result.cached_tokens + result.output_tokens
    ttft_ms, between_ms = ttfts_ms(good), [ms for ms in map(tpot_ms, good) if ms is not None]
    due_s = [result.due_s for result in results.served]
    within = sum(map(objective.met_by, results.served))
    prompt_tokens = sum(result.prompt_tokens for result in good)
    return Figures(
        policy=policy,
        requests=len(results.served),
        errors=len(results.served) - len(good),
        cached_share=cached_share(good),
        ideal_share=ideal_cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        ttft_p50_ms=percentile(ttft_ms, 0.50),
        ttft_p90_ms=percentile(ttft_ms, 0.90),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        tpot_p50_ms=percentile(between_ms, 0.50),
        tpot_p99_ms=percentile(between_ms, 0.99),
        within_objective_share=within / max(len(results.served), 1),
        goodput_per_s=within / (max(due_s) - min(due_s) or math.nan) if due_s else math.nan,
        exact_predictions_share=sum(result.predicted_cached_tokens == result.cached_tokens for result in good)
        / max(len(good), 1),
        work_by_pod=dict(sorted(work.items())),
        late_p99_ms=percentile([result.late_s * 1000 for result in results.served], 0.99),
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


def tpot_ms(result: RequestResult) -> float | None:
    """Mean time per output token after the first; None with fewer than two tokens."""
    if result.ttft_s is None or result.output_tokens < 2:
        return None
    return (result.e2e_s - result.ttft_s) * 1000 / (result.output_tokens - 1)


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


# --- progress ---


@dataclass(slots=True)
class RunProgress:
    done: int = 0
    errors: int = 0
    recent: deque[RequestResult] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, result: RequestResult) -> None:
        self.done += 1
        self.errors += bool(result.error)
        self.recent.append(result)

    def __str__(self) -> str:
        parts = []
        if times_ms := ttfts_ms(self.recent):
            late_ms = percentile([result.late_s * 1000 for result in self.recent], 0.99)
            parts += [
                f"last {len(self.recent)}: cached {cached_share(self.recent):.1%}",
                f"TTFT {percentile(times_ms, 0.5):.0f} ms",
                f"p99 {percentile(times_ms, 0.99):.0f}",
                f"client late {late_ms:.1f}",
            ]
        if self.errors:
            parts.append(f"{self.errors} errors")
        return ", ".join(parts)


@asynccontextmanager
async def show_progress(console: Console, label: str, planned: int) -> AsyncIterator[OnProgress]:
    """Display the results passed to the yielded callback: a bar on a terminal, otherwise a line every few seconds.

    The display refreshes at an interval and not per request, so that it does not slow the run.
    """
    seen = RunProgress()
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=planned, so_far="")

        def draw() -> None:
            progress.update(bar, completed=seen.done, so_far=str(seen), refresh=True)

        def print_line() -> None:
            parts = filter(None, (f"{label}: {seen.done} of {planned}", str(seen)))
            console.print(", ".join(parts), highlight=False, markup=False)

        show, every_s = (draw, REFRESH_S) if console.is_terminal else (print_line, LINE_EVERY_S)
        refreshing = asyncio.create_task(_repeat(show, every_s))
        try:
            yield seen
        finally:
            refreshing.cancel()
            show()


async def _repeat(show: Callable[[], None], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        show()
