"""What one tenant has used of one limit, and how much more this process may use.

Alone, a process may use the whole limit. Among several, `ceiling` is its share of it (`shares.py`).
"""

from __future__ import annotations

from enum import StrEnum

from router.admission.windows import WINDOW_S, SlidingWindow, UseGauge, freed_at

CONCURRENCY_RETRY_S = 1.0
"""When to try again after a limit of concurrent requests: the end of a request is not known."""


class Dimension(StrEnum):
    """What is limited."""

    REQUESTS = "requests per minute"
    PROMPT = "uncached prompt tokens per minute"
    OUTPUT = "output tokens per minute"
    CONCURRENT = "concurrent requests"


class Meter:
    """Use of one limit. `own`: by this process; `others`: by the other processes, as they last reported."""

    __slots__ = (
        "ceiling",
        "dimension",
        "free",
        "key",
        "last_amount",
        "last_second",
        "limit",
        "others",
        "own",
        "waiting",
    )

    def __init__(self, key: str, dimension: Dimension, limit: int, *, is_shared: bool = False) -> None:
        self.key = key
        self.dimension = dimension
        self.limit = limit
        kind = UseGauge if dimension is Dimension.CONCURRENT else SlidingWindow
        self.own, self.others = kind(), kind()
        self.ceiling: float = 0 if is_shared else limit
        """The most that this process may have used in the window."""
        self.free = limit
        """What no process might use yet at the last exchange."""
        self.waiting = 0
        """What requests wait for that did not fit under the ceiling."""
        self.last_amount, self.last_second = 0, -WINDOW_S

    def admits(self, second: int, amount: int) -> bool:
        """Whether this amount fits under the ceiling."""
        own = self.own  # its total is read without a call where that is right
        return (own.total if second < own.expires else own.at(second)) + amount <= self.ceiling

    def used(self, second: int) -> int:
        """By all processes."""
        return self.own.at(second) + self.others.at(second)

    def remaining(self, second: int) -> int:
        """What all processes together have left, as far as this one knows."""
        return max(0, self.limit - self.used(second))

    def reset_s(self, now_s: float) -> float:
        """Seconds until nothing is used any more if nothing more is added."""
        return max(0.0, max(self.own.empty_at(), self.others.empty_at()) - now_s)

    def retry_after_s(self, now_s: float, amount: int) -> float | None:
        """Seconds until this amount fits if nothing more is added; None if it never does."""
        if amount > self.limit:
            return None
        excess = self.used(int(now_s)) + amount - self.limit
        if excess <= 0:  # another process may use it, and has not
            return CONCURRENCY_RETRY_S
        freed = freed_at((self.own, self.others), excess)
        return CONCURRENCY_RETRY_S if freed is None else freed - now_s
