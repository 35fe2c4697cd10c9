"""What one tenant has used of one limit, and how much more this process may use.

Alone, a process may use the whole limit. Among several, `ceiling` is its share of it (`sharing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import merge
from math import ceil, inf
from typing import ClassVar

WINDOW_S = 60
KEPT_S = WINDOW_S + 1
"""An amount of second `s` leaves at the begin of second `s + KEPT_S`."""


@dataclass(slots=True, eq=False)
class SlidingWindow:
    """Amounts of the last minute by second, oldest first, and their sum. Each counts for at least `WINDOW_S` and at
    most a second longer, so no period of `WINDOW_S` has more than a window has ever counted at once. `second`: whole
    seconds of a clock that never goes back."""

    window_s: ClassVar[int] = WINDOW_S
    kept_s: ClassVar[int] = KEPT_S
    _amounts: dict[int, int] = field(default_factory=dict)
    expires: float = inf
    """Second in which the oldest amount leaves."""
    total: int = 0
    """Right until `expires`; see `at`."""

    def at(self, second: int) -> int:
        """The total in this second."""
        if second >= self.expires:
            self._expire(second)
        return self.total

    def add(self, second: int, amount: int) -> None:
        amounts = self._amounts
        if not amounts:
            self.expires = second + self.kept_s
        amounts[second] = amounts.get(second, 0) + amount
        self.total += amount

    def take_back(self, second: int, amount: int) -> None:
        """Subtract from what was added in that second; nothing if that has left."""
        held = self._amounts.get(second, 0)
        if held:
            taken = amount if amount < held else held
            self._amounts[second] = held - taken
            self.total -= taken

    def set_total(self, second: int, total: int) -> None:
        """Make the total this: by an amount of this second, or by less of the oldest."""
        excess = self.at(second) - total
        if excess < 0:
            return self.add(second, -excess)
        for begun in list(self._amounts):
            taken = min(excess, self._amounts[begun])
            self.take_back(begun, taken)
            excess -= taken
        return None

    def leaving(self) -> list[tuple[int, int]]:
        """(second, amount that leaves then), earliest first."""
        return [(begun + self.kept_s, amount) for begun, amount in self._amounts.items() if amount]

    def empty_at(self) -> int:
        """Second in which the last amount leaves; 0 if it is empty."""
        return next(reversed(self._amounts), -self.kept_s) + self.kept_s

    def _expire(self, second: int) -> None:
        amounts = self._amounts
        for begun in list(amounts):
            if begun + self.kept_s > second:
                self.expires = begun + self.kept_s
                return
            self.total -= amounts.pop(begun)
        self.expires = inf


class HourWindow(SlidingWindow):
    """The amounts of the last hour, by minute: each counts for up to a minute longer."""

    __slots__ = ()
    window_s = 3600
    kept_s = window_s + 60

    def add(self, second: int, amount: int) -> None:
        SlidingWindow.add(self, second - second % 60, amount)

    def take_back(self, second: int, amount: int) -> None:
        SlidingWindow.take_back(self, second - second % 60, amount)


class UseGauge(SlidingWindow):
    """What is in use now, with the methods of a window: nothing leaves by itself."""

    __slots__ = ()

    def at(self, second: int) -> int:
        return self.total

    def add(self, second: int, amount: int) -> None:
        self.total += amount

    def take_back(self, second: int, amount: int) -> None:
        self.total -= amount

    def set_total(self, second: int, total: int) -> None:
        self.total = total


def freed_at(windows: Sequence[SlidingWindow], amount: int) -> int | None:
    """The second in which this amount will have left these windows together; None where that cannot be known."""
    for second, leaving in merge(*(window.leaving() for window in windows)):
        amount -= leaving
        if amount <= 0:
            return second
    return None


CONCURRENCY_RETRY_S = 1.0
"""When to try again after a limit of concurrent requests: the end of a request is not known."""


class Dimension(StrEnum):
    """What is limited."""

    REQUESTS = "requests per minute"
    PROMPT = "uncached prompt tokens per minute"
    OUTPUT = "output tokens per minute"
    CONCURRENT = "concurrent requests"
    MONEY = "money per hour"


_WINDOWS: Mapping[Dimension, type[SlidingWindow]] = {Dimension.CONCURRENT: UseGauge, Dimension.MONEY: HourWindow}
MONEY_UNIT = 1e-9
"""Meters of money count in this part of the currency."""


def in_units(money: float) -> int:
    """Money as meters count it, rounded up."""
    return ceil(money / MONEY_UNIT)


class Meter:
    """Use of one limit. `own`: by this process; `others`: by the other processes, as they last reported."""

    def __init__(self, key: str, dimension: Dimension, limit: int, *, is_shared: bool = False) -> None:
        self.key = key
        self.dimension = dimension
        self.limit = limit
        kind = _WINDOWS.get(dimension, SlidingWindow)
        self.own, self.others = kind(), kind()
        self.ceiling: float = 0 if is_shared else limit
        """The most that this process may have used in the window."""
        self.free = limit
        """What no process might use yet at the last exchange."""
        self.waiting = 0
        """What requests wait for that did not fit under the ceiling."""
        self.last_amount, self.last_second = 0, -WINDOW_S

    def admits(self, second: int, amount: int) -> bool:
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
