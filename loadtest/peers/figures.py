"""Computes and prints the figures of a comparison.

What a pod did is read from the pod's own counters, because no peer reports which pod responded.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import NamedTuple, Self

from rich.table import Table

from loadtest.tables import GLOSSARY, text_table

_COUNTER = re.compile(r"^vllm:(prompt_tokens|prefix_cache_hits|generation_tokens)_total\{[^}]*\} (\S+)$", re.MULTILINE)


class PodTokens(NamedTuple):
    """Token counters of a pod since its start."""

    prompt: int
    cached: int
    output: int

    @classmethod
    def of_metrics(cls, text: str) -> Self:
        """Read vLLM's `/metrics`, summed over data-parallel ranks."""
        found = {"prompt_tokens": 0, "prefix_cache_hits": 0, "generation_tokens": 0}
        for name, value in _COUNTER.findall(text):
            found[name] += int(float(value))
        return cls(found["prompt_tokens"], found["prefix_cache_hits"], found["generation_tokens"])

    def since(self, before: PodTokens) -> PodTokens:
        """The difference to an earlier reading."""
        return PodTokens(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def work_tokens(self) -> int:
        """Tokens that were computed."""
        return self.prompt - self.cached + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One router in one round. Shares are 0..1; `imbalance` is the busiest pod's work over the mean."""

    requests: int
    errors: int
    cached_share: float
    ideal_share: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    imbalance: float
    cpu_ms_per_request: float
    rss_mib: float
    sticky_share: float = nan
    """Share of later requests of sessions that the same engine answered as the one before; NaN where unknown."""

    @property
    def of_ideal(self) -> float:
        """Cached share relative to an infinite cache."""
        return self.cached_share / self.ideal_share if self.ideal_share else 1.0


def cached_share(pods: Sequence[PodTokens]) -> float:
    """Cached part of all prompt tokens."""
    return sum(pod.cached for pod in pods) / max(sum(pod.prompt for pod in pods), 1)


def imbalance(pods: Sequence[PodTokens]) -> float:
    """1 if all pods did the same work; the number of pods if one did all."""
    work = [pod.work_tokens for pod in pods]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


class Column(NamedTuple):
    """A column of the table: a figure of each round, and which of two values is better."""

    title: str
    value: Callable[[Round], float]
    shown: str
    best: Callable[[Sequence[float]], float]


COLUMNS = (
    Column("cached", lambda one: one.cached_share, "{:.1%}", max),
    Column("of ideal", lambda one: one.of_ideal, "{:.0%}", max),
    Column("TTFT mean ms", lambda one: one.ttft_mean_ms, "{:.0f}", min),
    Column("p50 ms", lambda one: one.ttft_p50_ms, "{:.0f}", min),
    Column("p99 ms", lambda one: one.ttft_p99_ms, "{:.0f}", min),
    Column("peak", lambda one: one.imbalance, "{:.2f}", min),
    Column("CPU ms/req", lambda one: one.cpu_ms_per_request, "{:.2f}", min),
    Column("RSS MiB", lambda one: one.rss_mib, "{:.0f}", min),
    Column("stays", lambda one: one.sticky_share, "{:.1%}", max),
)
ERRORS = "errors"
LEGEND = (
    "Medians over the rounds; errors are of all rounds. "
    f"cached: {GLOSSARY['cached']}; of ideal: {GLOSSARY['of ideal']}. TTFT: time to first token. "
    f"peak: {GLOSSARY['peak']}. "
    "CPU and RSS: of the router's process tree. "
    "stays: requests that the pod of their session's request before answered. "
    "Bold: the best of its column, and those that are tied with it, because "
    "their ranges over the rounds overlap."
)


def cells(rounds: Mapping[str, Sequence[Round]], bold: str) -> list[list[str]]:
    """One row of text per router; the best of each column, and what is tied with it, formatted with `bold`."""
    rows = [[name] for name in rounds]
    for column in _columns(rounds):
        values = [[column.value(one) for one in of_one] for of_one in rounds.values()]
        medians = [statistics.median(of_one) for of_one in values]
        best = values[medians.index(column.best(medians))]
        for row, of_one, median in zip(rows, values, medians, strict=True):
            tied = min(of_one) <= max(best) and min(best) <= max(of_one)
            text = column.shown.format(median)
            row.append(bold.format(text) if tied else text)
    for row, of_router in zip(rows, rounds.values(), strict=True):
        row.append(str(sum(one.errors for one in of_router)))
    return rows


def _columns(rounds: Mapping[str, Sequence[Round]]) -> list[Column]:
    """The columns whose figures are known."""
    every = [one for of_one in rounds.values() for one in of_one]
    return [column for column in COLUMNS if not any(isnan(column.value(one)) for one in every)]


def titles(rounds: Mapping[str, Sequence[Round]]) -> tuple[str, ...]:
    """The heads of the columns of `cells`."""
    return ("router", *(column.title for column in _columns(rounds)), ERRORS)


def table(rounds: Mapping[str, Sequence[Round]], title: str) -> Table:
    """The table for a terminal."""
    return text_table(titles(rounds), cells(rounds, "[bold]{}[/bold]"), title=title, caption=LEGEND)


def markdown(rounds: Mapping[str, Sequence[Round]]) -> str:
    """The table as Markdown."""
    head = titles(rounds)
    rows = [head, ["---"] * len(head), *cells(rounds, "**{}**")]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{LEGEND}\n"
