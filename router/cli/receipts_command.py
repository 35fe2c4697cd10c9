"""`warmroute receipts summary`: what requests got by hour, class, pod and policy, and what changed, from a file."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf, log
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from router.cli.admin_client import JsonOption
from router.cli.receipt_files import lines_of, local, time_option
from router.cli.terminal import folded_table, printable
from router.observe.changes import Change
from router.observe.receipts import CLIENT_GONE, Line, Receipt

HOUR_S = 3600
MAX_ROWS, MAX_CHANGES = 500, 1000
OTHERS = "others"
COLUMNS = ("requests", "failed", "TTFT ms", "p50", "p99", "cached", "first", "last")
TIMES = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms")
STEP = 1.02
"""Times to first token are counted in steps of 2 %, so that a quantile is right to 1 %."""

receipts_app = typer.Typer(no_args_is_help=True, help="Read files of receipts.")


class By(StrEnum):
    HOUR = "hour"
    CLASS = "class"
    POD = "pod"
    POLICY = "policy"
    """With its version."""


@dataclass(slots=True)
class Tally:
    """Counts requests. Failed: neither answered nor left by their client. Cached tokens are those that pods report."""

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
        self.failed += one.result not in ("ok", CLIENT_GONE)
        self.first_s, self.last_s = min(self.first_s, one.at_s), max(self.last_s, one.at_s)
        if one.cached_tokens is not None:
            self.prompt_tokens += one.prompt_tokens
            self.cached_tokens += one.cached_tokens
        if one.ttft_ms is not None:
            self.ttft_ms += one.ttft_ms
            self.steps[round(log(max(one.ttft_ms, 0.01), STEP))] += 1

    def row(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failed": self.failed,
            "ttft_mean_ms": self.ttft_ms / self.steps.total() if self.steps else None,
            "ttft_p50_ms": self._quantile(0.5),
            "ttft_p99_ms": self._quantile(0.99),
            "cached_share": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "first_s": self.first_s,
            "last_s": self.last_s,
        }

    def _quantile(self, share: float) -> float | None:
        left = ceil(share * self.steps.total())
        for step in sorted(self.steps):
            left -= self.steps[step]
            if left <= 0:
                return STEP**step
        return None


class Summary:
    """Counts each line once, in bounded memory."""

    def __init__(self) -> None:
        self.tallies: dict[By, defaultdict[str, Tally]] = {by: defaultdict(Tally) for by in By}
        self.changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    def add(self, line: Line | Change) -> None:
        if isinstance(line, Change):
            self.changes.append(line)
        elif isinstance(line, Receipt):
            hour, policy = local(line.at_s - line.at_s % HOUR_S)[:-3], f"{line.policy} {line.policy_version}".strip()
            keys = (hour, line.workload, line.pod, policy)
            for rows, key in zip(self.tallies.values(), keys, strict=True):
                rows[key if key in rows or len(rows) < MAX_ROWS else OTHERS].add(line)

    def rows(self, by: By) -> dict[str, dict[str, Any]]:
        """In order of the first request."""
        tallies = sorted(self.tallies[by].items(), key=lambda one: one[1].first_s)
        return {key or "none": tally.row() for key, tally in tallies}


@receipts_app.callback()
def _only_groups_commands() -> None: ...


@receipts_app.command("summary")
def summary_command(
    receipts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of receipts.")],
    by: Annotated[By | None, typer.Option(help="Only this table.", show_default="all")] = None,
    since: Annotated[float | None, time_option("Arrived at this time or later", "the beginning")] = None,
    until: Annotated[float | None, time_option("Arrived before", "the end")] = None,
    model: Annotated[str, typer.Option(help="Only this model.", show_default="all")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print requests, failures, TTFT and cached share by hour, class, pod and policy, and what changed."""
    found = Summary()
    for line in lines_of(receipts):
        is_then = (since or 0.0) <= line.at_s < (until or inf)
        if is_then and (not model or not isinstance(line, Receipt) or line.model == model):
            found.add(line)
    rows = {each.value: found.rows(each) for each in By if by in (None, each)}
    changes = sorted(found.changes, key=lambda change: change.at_s)
    if as_json:
        print(msgspec.json.encode(rows | {"changes": changes}).decode())
        return
    for name, named in rows.items():
        table = folded_table(name, numbers=COLUMNS, box=None)
        for key, row in named.items():
            table.add_row(printable(key), *_cells(row))
        Console().print(table, "")
    table = folded_table("changed at", "what", "subject", "cause", box=None)
    for change in changes:
        table.add_row(local(change.at_s), *map(printable, (change.kind, change.subject, change.cause)))
    Console().print(table if changes else "no recorded changes")


def _cells(row: dict[str, Any]) -> list[str]:
    times = ("-" if row[name] is None else f"{row[name]:,.1f}" for name in TIMES)
    share = "-" if row["cached_share"] is None else f"{row['cached_share']:.1%}"
    seen = (local(row[name])[5:16] for name in ("first_s", "last_s"))
    return [f"{row['requests']:,}", f"{row['failed']:,}", *times, share, *seen]
