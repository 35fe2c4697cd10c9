"""How does a dict grow to a million keys without anybody waiting for it?

A full dict moves all that it has in one go: 1.5 ms for 44,000 keys, 60 and more for 700,000. So what may grow large is
kept in many, each of which grows alone. This file does not know what is kept.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

K = TypeVar("K")
V = TypeVar("V")

SHARDS = 89
"""A prime: numbers of any pattern are spread evenly. All grow at about the same time, a few with each event; of more,
hardly any would be in the CPU's caches when it is asked for."""

Shards: TypeAlias = list[dict[K, V]]
"""Key `k`, an int, is in dict `k % SHARDS`."""


def shards() -> Shards[K, V]:
    """All of them, empty."""
    return [{} for _ in range(SHARDS)]
