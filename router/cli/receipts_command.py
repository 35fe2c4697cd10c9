"""`warmroute receipts summary`: what requests got by hour, class and pod, and what changed meanwhile, from a file."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf, log
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from router.cli.admin_client import JsonOption
from router.cli.receipt_files import FileArgument, lines_of, local, time_option
from router.cli.terminal import folded_table, printable
from router.observe.changes import Change, ChangeKind
from router.observe.receipts import CLIENT_GONE, Line, Receipt
from router.types import PodState

HOUR_S = 3600
MAX_ROWS, MAX_CHANGES = 500, 1000
OTHERS = "others"
STEP = 1.02
"""Times to first token are counted in steps of 2 %, so that a quantile is right to 1 %."""
COLUMNS = ("requests", "failed", "TTFT mean, ms", "p50", "p99", "cached")

receipts_app = typer.Typer(no_args_is_help=True, help="Read files of receipts.")


class By(StrEnum):
    HOUR = "hour"
    CLASS = "class"
    POD = "pod"


class Row(msgspec.Struct, frozen=True):
    """Failed: neither answered nor left by their client. The cached share is that of prompts whose pod reported it."""

    requests: int
    failed: int
    ttft_mean_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    cached_share: float | None


@dataclass(slots=True)
class Tally:
    """Counts the requests of one row."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)

    def add(self, one: Receipt) -> None:
        self.requests += 1
        self.failed += one.result not in ("ok", CLIENT_GONE)
        if one.cached_tokens is not None:
            self.prompt_tokens += one.prompt_tokens
            self.cached_tokens += one.cached_tokens
        if one.ttft_ms is not None:
            self.ttft_ms += one.ttft_ms
            self.steps[round(log(max(one.ttft_ms, 0.01), STEP))] += 1

    def row(self) -> Row:
        mean_ms = self.ttft_ms / self.steps.total() if self.steps else None
        cached = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None
        return Row(self.requests, self.failed, mean_ms, self._quantile(0.5), self._quantile(0.99), cached)

    def _quantile(self, share: float) -> float | None:
        left = ceil(share * self.steps.total())
        for step in sorted(self.steps):
            left -= self.steps[step]
            if left <= 0:
                return STEP**step
        return None


class Summary:
    """Counts lines once. Of an hour without lines of changes, `changes` has those that its receipts and fleets show."""

    def __init__(self) -> None:
        self.tallies: dict[By, defaultdict[str, Tally]] = {by: defaultdict(Tally) for by in By}
        self._recorded: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._seen: defaultdict[int, defaultdict[ChangeKind, set[str]]] = defaultdict(lambda: defaultdict(set))

    def add(self, line: Line | Change) -> None:
        if isinstance(line, Change):
            self._recorded.append(line)
        elif isinstance(line, Receipt):
            self._count(line)
        else:
            serving = (
                f"{pod.id}: {' '.join((*pod.models, pod.weights, pod.version))}".rstrip() for pod, _ in line.pods
            )
            self._see(line.at_s, "generation", (f"{name}: {what}" for name, what in served))
            self._see(line.at_s, "ejected", (pod.id for pod, state in line.pods if state is PodState.EJECTED))

    def _count(self, one: Receipt) -> None:
        hour = local(one.at_s - one.at_s % HOUR_S)[:-3]
        for by, key in zip(By, (hour, one.workload or "-", one.pod or "no pod"), strict=True):
            rows = self.tallies[by]
            rows[key if key in rows or len(rows) < MAX_ROWS else OTHERS].add(one)
        if one.policy:
            self._see(one.at_s, "policy", [f"{one.policy} {one.policy_version}"])
            self._see(one.at_s, "joined", [one.pod])

    def _see(self, at_s: float, kind: ChangeKind, subjects: Iterable[str]) -> None:
        if len(self._seen) < MAX_ROWS and len(found := self._seen[int(at_s // HOUR_S)][kind]) < MAX_ROWS:
            found.update(subjects)

    def changes(self) -> list[Change]:
        """In order of time."""
        known = {int(change.at_s // HOUR_S) for change in self._recorded}
        shown = [change for change in self._differences() if change.at_s // HOUR_S not in known]
        return sorted([*self._recorded, *shown[:MAX_CHANGES]], key=lambda change: change.at_s)

    def _differences(self) -> Iterator[Change]:
        before: dict[ChangeKind, set[str]] = {}
        ends: dict[ChangeKind, ChangeKind] = {"joined": "left", "ejected": "readmitted", "policy": "policy"}
        for hour, kinds in sorted(self._seen.items()):
            for kind, now in kinds.items():
                old = before.get(kind, now)
                before[kind] = now
                yield from (Change(hour * HOUR_S, kind, name, "new in this hour") for name in sorted(now - old))
                if end := ends.get(kind):
                    yield from (Change(hour * HOUR_S, end, name, "not seen in it") for name in sorted(old - now))


@receipts_app.callback()
def _only_groups_commands() -> None: ...


@receipts_app.command("summary")
def summary_command(
    receipts: FileArgument,
    by: Annotated[By | None, typer.Option(help="Only this table.", show_default="all three")] = None,
    since: Annotated[float | None, time_option("Arrived at this time or later", "the beginning")] = None,
    until: Annotated[float | None, time_option("Arrived before", "the end")] = None,
    model: Annotated[str, typer.Option(help="Only this model.", show_default="all")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print requests, failures, TTFT and cached share by hour, class and pod, and what changed."""
    found = Summary()
    for line in lines_of(receipts):
        is_then = (since or 0.0) <= line.at_s < (until or inf)
        if is_then and (not model or not isinstance(line, Receipt) or line.model == model):
            found.add(line)
    rows = {each.value: _rows(each, found.tallies[each]) for each in By if by in (None, each)}
    changes = found.changes()
    if as_json:
        return print(msgspec.json.encode(rows | {"changes": changes}).decode())
    for name, named in rows.items():
        table = folded_table(name, numbers=COLUMNS)
        for key, row in named.items():
            shares = "-" if row.cached_share is None else f"{row.cached_share:.1%}"
            times = (row.ttft_mean_ms, row.ttft_p50_ms, row.ttft_p99_ms)
            table.add_row(printable(key), f"{row.requests:,}", f"{row.failed:,}", *map(_ms, times), shares)
        Console().print(table)
    table = folded_table("changed at", "what", "subject", "cause")
    for change in changes:
        table.add_row(local(change.at_s), *map(printable, (change.kind, change.subject, change.cause)))
    return Console().print(table if changes else "no changes")


def _rows(by: By, tallies: dict[str, Tally]) -> dict[str, Row]:
    order = sorted(tallies) if by is By.HOUR else sorted(tallies, key=lambda key: -tallies[key].requests)
    return {key: tallies[key].row() for key in order}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
