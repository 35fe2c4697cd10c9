"""Looks up single metrics in the Prometheus text format.

Three lines of an engine's 100 kB are needed, four times a second for each pod: the text is searched instead of parsed,
in linear time. Malformed lines are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from router.guards import Bound, checked
from router.types import PodLoad

METRICS = Bound("page of metrics", 3 * 1024 * 1024, 2560)
"""Twenty times the largest page of an engine. The items are what the lines of one metric cost: two each, and one for
each 32 bytes."""
MAX_LINE_BYTES, MAX_LABELS = 8192, 64
MAX_REQUESTS = 1_000_000
"""More requests than any pod has."""
MAX_KV_USAGE = 1.5
"""Some engines count blocks twice for a moment."""

# One label; a value may contain braces and escaped quotes. Possessive: an open quote is found in one pass.
_LABEL = re.compile(rb'[ \t,]*+([A-Za-z_]\w*+)[ \t]*+=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_AFTER_LABELS = re.compile(rb"[ \t,]*+\}")
_VALUE = re.compile(rb"[ \t]++([^ \t\r]++)")
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGauges:
    """An engine's metric names for its load; of several names, the first one present counts."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...]
    rank_label: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.running + self.waiting + self.kv_usage


def only(names: Iterable[str]) -> str:
    """The query that asks for the samples with these names alone. Engines may ignore it, or answer nothing."""
    return "?" + "&".join(f"name%5B%5D={name}" for name in names)


def series(text: bytes, names: Iterable[str]) -> set[tuple[object, ...]]:
    """The metrics with these names, by their labels. Raises `OutOfBounds`."""
    return {(name, *sorted(one.labels.items())) for name in names for one in samples(text, name)}


def samples(text: bytes, name: str) -> Iterator[Sample]:
    """Every sample of the metric with exactly this name. In the format they are consecutive, so the search stops after
    them. Raises `OutOfBounds`."""
    METRICS.check_size(len(text))
    key = name.encode()
    at, items = 0 if text.startswith(key) else _next_line(text, key, 0), 0
    while at >= 0:
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        line = text[at + len(key) : min(end, at + MAX_LINE_BYTES)]
        items += 2 + (len(line) // 32 if line.startswith(b"{") else 0)
        METRICS.check_items(items)
        sample = _sample(line)
        if sample is not None:
            yield sample
            if not text.startswith(key, end + 1):
                return
        at = _next_line(text, key, end)


def _next_line(text: bytes, key: bytes, at: int) -> int:
    """Where the next line begins that begins with `key`; -1 if there is none."""
    found = text.find(b"\n" + key, at)
    return found + 1 if found >= 0 else -1


def _sample(rest: bytes) -> Sample | None:
    """The sample of a line, from its labels on; None if it is malformed."""
    labels, at = {}, 0
    if rest.startswith(b"{"):
        at = 1
        for _ in range(MAX_LABELS):
            if (label := _LABEL.match(rest, at)) is None:
                break
            labels[label[1].decode()] = _unescaped(label[2].decode("utf-8", "replace"))
            at = label.end()
        closing = _AFTER_LABELS.match(rest, at)
        at = closing.end() if closing else len(rest)
    found = _VALUE.match(rest, at)
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        return None
    return Sample(labels, value) if math.isfinite(value) else None


def read_load(text: bytes, gauges: LoadGauges, dp_rank: int | None, now_s: float) -> PodLoad | None:
    """The load of one data-parallel rank, or of all where `dp_rank` is None; None where `running` is missing. Raises
    `OutOfBounds`, and `OutOfRange` for figures that cannot be true.

    Within a rank the largest value counts: tensor-parallel ranks may each export the same requests."""
    running = _by_rank(text, gauges.running, gauges.rank_label, dp_rank)
    if not running:
        return None
    waiting = _by_rank(text, gauges.waiting, gauges.rank_label, dp_rank)
    usage = _by_rank(text, gauges.kv_usage, gauges.rank_label, dp_rank, MAX_KV_USAGE)
    return PodLoad(
        running=sum(map(int, running.values())),
        waiting=sum(map(int, waiting.values())),
        kv_usage=min(sum([value / len(usage) for value in usage.values()]), 1.0),
        scraped_at_s=now_s,
    )


def _by_rank(
    text: bytes, names: tuple[str, ...], label: str, dp_rank: int | None, most: float = MAX_REQUESTS
) -> dict[str | None, float]:
    """Values by rank, of the first of `names` that is present. A sample without a rank belongs to the wanted one.
    Raises `OutOfRange`."""
    wanted = None if dp_rank is None else str(dp_rank)
    for name in names:
        ranks: dict[str | None, float] = {}
        for sample in samples(text, name):
            rank = sample.labels.get(label, wanted)
            if wanted in (None, rank):
                ranks[rank] = max(ranks.get(rank, 0.0), checked(name, sample.value, 0, most))
        if ranks:
            return ranks
    return {}


def _unescaped(value: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], value) if "\\" in value else value
