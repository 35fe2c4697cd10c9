"""How is a run going? A bar on a terminal, a line every few seconds elsewhere.

It looks at what was measured a few times a second, never once a request, so that watching a run does not slow it. This
file never decides anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from router.cli.figures import percentile, ttfts_ms
from router.cli.load_driver import RequestResult

OnProgress: TypeAlias = Callable[[RequestResult], None]
REFRESH_S = 0.5
LINE_EVERY_S = 5.0
RECENT = 200
"""The figures shown are of so many requests."""


@dataclass(slots=True)
class Seen:
    """What is done so far."""

    done: int = 0
    errors: int = 0
    recent: deque[RequestResult] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, one: RequestResult) -> None:
        """One more."""
        self.done += 1
        self.errors += bool(one.error)
        self.recent.append(one)

    def __str__(self) -> str:
        times_ms = ttfts_ms(self.recent)
        if not times_ms:
            return f"{self.errors} errors" if self.errors else ""
        late_ms = percentile([one.late_s * 1000 for one in self.recent], 0.99)
        failed = f", {self.errors} errors" if self.errors else ""
        return (
            f"TTFT {percentile(times_ms, 0.5):.0f} ms, p99 {percentile(times_ms, 0.99):.0f}, late {late_ms:.1f}{failed}"
        )


@asynccontextmanager
async def shown(console: Console, label: str, planned: int) -> AsyncIterator[OnProgress]:
    """While this is open, what the yielded function is told is shown."""
    seen = Seen()
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=planned, so_far="")

        def draw() -> None:
            progress.update(bar, completed=seen.done, so_far=str(seen), refresh=True)

        def say() -> None:
            console.print(f"{label}: {seen.done} of {planned}, {seen}", highlight=False, markup=False)

        show, every_s = (draw, REFRESH_S) if console.is_terminal else (say, LINE_EVERY_S)
        watching = asyncio.create_task(_again_and_again(show, every_s))
        try:
            yield seen
        finally:
            watching.cancel()
            show()


async def _again_and_again(show: Callable[[], None], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        show()
