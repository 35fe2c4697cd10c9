"""`warmroute receipts summary`: what requests got by hour, class, pod and policy, and what changed, from a file."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf, log
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from typer.core import TyperGroup

from router.cli.admin_client import JsonOption
from router.cli.receipt_files import ReceiptLine, lines_of, local, time_option
from router.cli.terminal import folded_table, printable
from router.observe.changes import Change
from router.observe.receipts import Receipt
from router.observe.thresholds import FAILED

HOUR_S = 3600
MAX_ROWS, MAX_CHANGES = 500, 1000
OTHERS = "others"
COLUMNS = ("requests", "failed", "ttft", "p50", "p99", "cached", "first", "last")
STEP = 1.02
"""Times to first token are counted in steps of 2 %, so that a quantile is right to 1 %."""


class _ReceiptsGroup(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and Path(args[0]).is_file():
            ctx.fail(f"that is a file: run `warmroute receipts summary {printable(args[0])}`")
        return super().resolve_command(ctx, args)


receipts_app = typer.Typer(cls=_ReceiptsGroup, no_args_is_help=True, help="Read files of receipts.")


@dataclass(slots=True)
class Tally:
    """Counts requests. Failed: as the page counts (`thresholds.FAILED`). Cached tokens are those that pods report."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)
    first_s: float = inf
    last_s: float = 0.0

    def add(self, one: Receipt) -> None:
        self.requests += 1
        self.failed += one.result in FAILED
        self.first_s, self.last_s = min(self.first_s, one.at_s), max(self.last_s, one.at_s)
        if one.cached_tokens is not None:
            self.prompt_tokens += one.prompt_tokens
            self.cached_tokens += one.cached_tokens
        if one.ttft_ms is not None:
            self.ttft_ms += one.ttft_ms
            self.steps[round(log(max(one.ttft_ms, 0.01), STEP))] += 1

    def merge(self, other: Tally) -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.ttft_ms += other.ttft_ms
        self.steps += other.steps
        self.first_s, self.last_s = min(self.first_s, other.first_s), max(self.last_s, other.last_s)

    def row(self) -> dict[str, int | float | str | None]:
        """TTFT (mean, p50, p99) in milliseconds, the cached share in percent, times of the first and last request."""
        streamed = self.steps.total()
        return {
            "requests": self.requests,
            "failed": self.failed,
            "ttft": self.ttft_ms / streamed if streamed else None,
            "p50": self._quantile(ceil(0.5 * streamed)),
            "p99": self._quantile(ceil(0.99 * streamed)),
            "cached": 100 * self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "first": local(self.first_s),
            "last": local(self.last_s),
        }

    def _quantile(self, rank: int) -> float | None:
        for step in sorted(self.steps):
            rank -= self.steps[step]
            if rank <= 0:
                return STEP**step
        return None


Tallies = defaultdict[str, defaultdict[str, Tally]]
"""By kind of row and name."""


def _add(rows: defaultdict[str, Tally], name: str, one: Receipt) -> None:
    """Count a receipt in its row. Beyond `MAX_ROWS`, the row whose last request is the oldest is added to `OTHERS`."""
    if name not in rows and len(rows.keys() - {OTHERS}) >= MAX_ROWS:
        oldest = min(rows.keys() - {OTHERS}, key=lambda known: (rows[known].last_s, known))
        rows[OTHERS].merge(rows.pop(oldest))
    rows[name].add(one)


def summed(lines: Iterable[ReceiptLine]) -> tuple[Tallies, list[Change]]:
    """In one pass and bounded memory."""
    tallies: Tallies = defaultdict(lambda: defaultdict(Tally))
    changes: deque[Change] = deque(maxlen=MAX_CHANGES)
    for line in lines:
        if isinstance(line, Change):
            changes.append(line)
        elif isinstance(line, Receipt):
            hour, policy = local(line.at_s - line.at_s % HOUR_S)[:-3], f"{line.policy} {line.policy_version}".strip()
            for by, name in ("hour", hour), ("class", line.workload), ("pod", line.pod), ("policy", policy):
                _add(tallies[by], name, line)
    return tallies, sorted(changes, key=lambda change: change.at_s)


@receipts_app.callback()
def _only_groups_commands() -> None: ...


@receipts_app.command("summary")
def summary_command(
    receipts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of receipts.")],
    by: Annotated[
        Literal["hour", "class", "pod", "policy"] | None, typer.Option(help="Only this table.", show_default="all")
    ] = None,
    since: Annotated[float | None, time_option("Arrived at this time or later", "the beginning")] = None,
    until: Annotated[float | None, time_option("Arrived before", "the end")] = None,
    model: Annotated[str, typer.Option(help="Only this model.", show_default="all")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print requests, failures, TTFT (ms) and cached share (%) by hour, class, pod and policy, and what changed."""
    wanted = (
        line
        for line in lines_of(receipts)
        if (since or 0.0) <= line.at_s < (until or inf)
        and (not model or not isinstance(line, Receipt) or line.model == model)
    )
    tallies, changes = summed(wanted)
    rows = {
        kind: {name or "none": tally.row() for name, tally in sorted(named.items(), key=lambda one: one[1].first_s)}
        for kind, named in tallies.items()
        if by in (None, kind)
    }
    for kind in rows.keys() & {kind for kind, named in tallies.items() if OTHERS in named}:
        print(f"more than {MAX_ROWS} rows by {kind}: the oldest are added up as `{OTHERS}`", file=sys.stderr)
    if as_json:
        print(msgspec.json.encode(rows | {"changes": changes}).decode())
        return
    for kind, named in rows.items():
        columns = COLUMNS if kind in ("pod", "policy") else COLUMNS[:-2]
        table = folded_table(kind, numbers=columns, box=None)
        for name, row in named.items():
            table.add_row(printable(name), *(_cell(row[column]) for column in columns))
        Console().print(table, "")
    table = folded_table("changed at", "what", "subject", "cause", box=None)
    for change in changes:
        table.add_row(local(change.at_s), *map(printable, (change.what, change.subject, change.cause)))
    Console().print(table if changes else "no recorded changes")


def _cell(value: int | float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value[5:16] if value else "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
