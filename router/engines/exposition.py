"""What do these metrics say?

The least of a Prometheus text parser: sums of the samples of the names that are asked for, and the labels of one. Never
raises: what cannot be read does not exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def sums(text: str, names: Iterable[str], rank: int | None = None) -> Mapping[str, float]:
    """Sum of all samples of each name; of one data-parallel rank where `rank` is given. Missing names are missing."""
    wanted = frozenset(names)
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, labels, value = _sample(line)
        if name in wanted and value is not None and _of_rank(labels, rank):
            found[name] = found.get(name, 0.0) + value
    return found


def labels_of(text: str, name: str) -> Mapping[str, str]:
    """Labels of the first sample of `name`."""
    for line in text.splitlines():
        if line.startswith(name):
            found, labels, _ = _sample(line)
            if found == name:
                return dict(_LABEL.findall(labels))
    return {}


def _sample(line: str) -> tuple[str, str, float | None]:
    """(name, label text, value) of one line; value None where it is no finite sample."""
    name, brace, rest = line.partition("{")
    if brace:
        labels, _, value = rest.rpartition("}")
    else:
        labels = ""
        name, _, value = line.partition(" ")
    parts = value.split()
    try:
        number = float(parts[0]) if parts else math.nan
    except ValueError:
        return name, labels, None
    return name, labels, number if math.isfinite(number) else None


def _of_rank(labels: str, rank: int | None) -> bool:
    if rank is None:
        return True
    found = dict(_LABEL.findall(labels))
    said = found.get("engine", found.get("dp_rank"))
    return said is None or said == str(rank)
