"""What `warmroute top` draws: figures, what needs attention, pods and recent decisions, as many as fit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from router.cli.terminal import printable
from router.frontends.admin.page_figures import BEYOND, PageFigures
from router.frontends.admin.page_notices import Notice
from router.frontends.admin.page_snapshot import DecisionRow, PodRow
from router.observe.hit_worth import CHOSEN, ROUND_ROBIN
from router.types import PodState

MAX_NOTICES = 3
MIN_DECISIONS, MAX_DECISIONS = 4, 30
UNKNOWN = "-"
MAX_NAME = 28
"""Longer names are cut, in the middle of the screen where a row must be one line."""


class Snapshot(msgspec.Struct):
    """One snapshot of a router, without what is not shown."""

    at_s: float
    span_s: float
    in_flight: float
    last_minute: PageFigures
    since_start: PageFigures
    pods: list[PodRow]
    decisions: list[DecisionRow]
    pods_not_shown: int = 0
    notices: list[Notice] = []
    price: float | None = None
    currency: str = ""


class TopView:
    """The latest snapshot, drawn in the height of the terminal. `of_all`: with every pod, since the start."""

    def __init__(self, url: str, *, of_all: bool = False) -> None:
        self._url = url
        self._of_all = of_all
        self._latest: Snapshot | None = None
        self.problem = ""
        """Why there are no new snapshots."""

    def add(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        self.problem = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._latest:
            yield Text(self.problem or f"waiting for {self._url}")
            return
        head = list(self._head(self._latest, options.max_width))
        rows = 10**6 if self._of_all else max(options.height or console.height, 1) - len(head)
        yield Group(*head, *_tables(self._latest, rows))

    def _head(self, now: Snapshot, width: int) -> Iterator[Text]:
        """Lines that are cut, not folded, so that each is one row."""
        for line, style in self._lines(now):
            text = printable(line)
            text.truncate(width, overflow="ellipsis")
            text.stylize(style)
            yield text

    def _lines(self, now: Snapshot) -> Iterator[tuple[str, str]]:
        figures = now.since_start if self._of_all else now.last_minute
        ready, pods = sum(one.state == PodState.READY for one in now.pods), len(now.pods) + now.pods_not_shown
        at = time.strftime("%H:%M:%S", time.localtime(now.at_s))
        quit_hint = "" if self._of_all else "   q: quit"
        yield f"warmroute {at}   pods ready {ready} of {pods}{quit_hint}   {self._url}", "bold"
        if self.problem:
            yield self.problem, "red"
        traffic = _rate(figures.requests, now.span_s)
        if self._of_all:
            traffic = f"{figures.requests:,.0f} requests since start"
        ttft = f"TTFT p50 {_seconds(figures.ttft_s.p50)}, p95 {_seconds(figures.ttft_s.p95)}"
        failed = f"{figures.failures:,.0f} failed"
        yield f"{traffic}, {now.in_flight:,.0f} in flight, {failed}   {ttft}", "red" if figures.failures else ""
        shares = (f"{line} {_percent(share)}" for line, share in figures.token_shares.items())
        yield f"prompt tokens in caches: {', '.join(shares)}", ""
        yield _worth(now, figures), ""
        for one in now.notices[:MAX_NOTICES]:
            yield f"! {one.text}", "yellow"
        if more := len(now.notices) - MAX_NOTICES:
            yield from [(f"! and {more} more", "yellow")] if more > 0 else []


def _worth(now: Snapshot, figures: PageFigures) -> str:
    chosen_s, other_s = (figures.saved_s.get(placement, 0.0) for placement in (CHOSEN, ROUND_ROBIN))
    gpu_hours = now.since_start.saved_gpu_s.get(CHOSEN, 0.0) / 3600
    money = f", {gpu_hours * now.price:,.2f} {now.currency}" if now.price else ""
    saved = f"hits saved {_seconds(chosen_s)} prefill (round robin {_seconds(other_s)})"
    return f"{saved}, in all {gpu_hours:,.3g} GPU-h{money}"


# --- tables ---


def _tables(now: Snapshot, rows: int) -> Iterator[RenderableType]:
    """Pods and decisions; each table has a line of titles, and there is an empty line before each."""
    most = max(rows - 4, 2)
    pods = min(len(now.pods), max(most - max(min(len(now.decisions), MAX_DECISIONS), MIN_DECISIONS), most // 2))
    hidden = len(now.pods) - pods + now.pods_not_shown
    if hidden and pods < len(now.pods):
        pods, hidden = pods - 1, hidden + 1  # the line that counts them
    yield Text()
    yield _pod_table(now.pods[:pods])
    if hidden:
        yield Text(f"and {hidden:,} more pods", style="dim")
    yield Text()
    yield _decision_table(now.decisions[: max(min(most - pods - bool(hidden), MAX_DECISIONS), 0)])


def _table(*left: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=MAX_NAME)
    return table


def _pod_table(pods: list[PodRow]) -> Table:
    table = _table("pod", "state", "matching", "KV")
    for name in ("running", "waiting", "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("attention", no_wrap=True, overflow="ellipsis")
    for one in pods:
        state = Text(one.state, style="green" if one.state == PodState.READY else "red")
        usage = UNKNOWN if one.load_age_s is None else _percent(one.kv_usage)
        work = map(str, (one.running, one.waiting, one.in_flight))
        table.add_row(printable(one.id), state, one.matching, usage, *work, printable(_attention(one)))
    return table


def _attention(pod: PodRow) -> str:
    """Why a pod is not as it should be."""
    events = "KV events incomplete" if pod.kv_events == "incomplete" else ""
    reason = "" if pod.state == PodState.READY else pod.state_reason
    return "; ".join(filter(None, (reason, pod.matching_reason, events)))


def _decision_table(decisions: list[DecisionRow]) -> Table:
    table = _table("time", "workload", "pod")
    for name in ("prompt", "cached", "expected", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True, overflow="ellipsis")
    for one in decisions:
        cached = UNKNOWN if one.cached_tokens is None else f"{one.cached_tokens:,}"
        ttft_s = None if one.ttft_ms is None else one.ttft_ms / 1000
        result = f"{one.result or 'running'}{f', {one.failures} retried' if one.failures else ''}"
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(one.at_s)),
            printable(one.workload or UNKNOWN),
            printable(one.pod),
            f"{one.prompt_tokens:,}",
            cached,
            _seconds(one.expected_ms / 1000),
            _seconds(ttft_s),
            printable(result),
        )
    return table


# --- numbers ---


def _rate(count: float, span_s: float) -> str:
    return f"{count / span_s:,.1f} requests/s" if span_s >= 0.5 else "- requests/s"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value == BEYOND:
        return "more"
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"
