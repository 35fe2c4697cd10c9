"""The display of a run's progress."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from loadtest.simulator.outcome import cached_share
from loadtest.traffic.figures import percentile, ttfts_ms
from loadtest.traffic.load_driver import OnProgress, RequestResult

REFRESH_S = 0.5
LINE_EVERY_S = 5.0
RECENT = 200
"""Number of requests in the displayed figures."""


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
