"""Looks up single metrics in the Prometheus text format.

Three lines of an engine's 100 kB are needed, four times a second for each pod: the text is searched instead of parsed.
Malformed lines are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from router.types import PodLoad

# Labels in braces (a value may contain braces and escaped quotes), then the value; no part crosses a line end.
_REST = re.compile(rb'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\[^\n])*")*)\})?[ \t]+([^ \t\r\n]+)')
_LABEL = re.compile(rb'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: labels and a finite value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGauges:
    """An engine's metric names for its load; of several names, the first one present counts."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...]
    rank_label: str = ""


def samples(text: bytes, name: str) -> Iterator[Sample]:
    """Every sample of the metric with exactly this name. In the format they are consecutive, so the search stops after
    them."""
    key = name.encode()
    next_key = b"\n" + key
    at = text.find(key)
    while at >= 0:
        end = at + len(key)
        rest = _REST.match(text, end) if at == 0 or text[at - 1 : at] == b"\n" else None
        value = _finite(rest[2]) if rest else None
        if rest and value is not None:
            yield Sample(_labels(rest[1] or b""), value)
        if rest:
            line_end = text.find(b"\n", rest.end())
            at = line_end + 1 if text.startswith(next_key, line_end) else -1
        else:
            at = text.find(key, end)


def read_load(text: bytes, gauges: LoadGauges, dp_rank: int | None, now_s: float) -> PodLoad | None:
    """The load of one data-parallel rank, or of all where `dp_rank` is None; None where `running` is missing.

    Within a rank the largest value counts: tensor-parallel ranks may each export the same requests."""
    running = _by_rank(text, gauges.running, gauges.rank_label, dp_rank)
    if not running:
        return None
    waiting = _by_rank(text, gauges.waiting, gauges.rank_label, dp_rank)
    usage = _by_rank(text, gauges.kv_usage, gauges.rank_label, dp_rank)
    return PodLoad(
        running=_count(running.values()),
        waiting=_count(waiting.values()),
        kv_usage=sum([value / len(usage) for value in usage.values()]),
        scraped_at_s=now_s,
    )


def _count(requests: Iterable[float]) -> int:
    """The sum over ranks, as integers: finite floats may add up to infinity."""
    return sum(map(int, requests))


def _by_rank(text: bytes, names: tuple[str, ...], label: str, dp_rank: int | None) -> dict[str | None, float]:
    """Values by rank, of the first of `names` that is present. A sample without a rank belongs to the wanted one."""
    wanted = None if dp_rank is None else str(dp_rank)
    for name in names:
        ranks: dict[str | None, float] = {}
        for sample in samples(text, name):
            rank = sample.labels.get(label, wanted)
            if wanted in (None, rank):
                ranks[rank] = max(ranks.get(rank, 0.0), sample.value)
        if ranks:
            return ranks
    return {}


def _labels(text: bytes) -> dict[str, str]:
    found = _LABEL.findall(text)
    return {name.decode(): _unescaped(value.decode("utf-8", "replace")) for name, value in found}


def _unescaped(value: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], value) if "\\" in value else value


def _finite(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
